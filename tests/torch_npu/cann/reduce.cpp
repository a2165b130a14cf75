// HCCL's reductions, on the types that its header and CANN's pages name for them: no float64, nothing unsigned.
#include <algorithm>
#include <cstring>

#include "reduce.h"

namespace {

struct BFloat16 {
  uint16_t bits;
};

float widen(BFloat16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Rounds to the nearest, halves to the even one.
BFloat16 narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <typename T>
T combine(T left, T right, HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_SUM:
      return left + right;
    case HCCL_REDUCE_PROD:
      return left * right;
    case HCCL_REDUCE_MAX:
      return std::max(left, right);
    default:
      return std::min(left, right);
  }
}

template <>
BFloat16 combine(BFloat16 left, BFloat16 right, HcclReduceOp op) {
  return narrow(combine(widen(left), widen(right), op));
}

template <typename T>
bool reduce_as(void* into, const void* with, size_t count, HcclReduceOp op) {
  auto* left = static_cast<T*>(into);
  auto* right = static_cast<const T*>(with);
  for (size_t i = 0; i < count; i++) left[i] = combine(left[i], right[i], op);
  return true;
}

}  // namespace

size_t width_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
    case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    default:
      return 0;
  }
}

bool reduces(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_FP32:
    case HCCL_DATA_TYPE_BFP16:
      return true;
    default:
      return false;
  }
}

bool reduce(void* into, const void* with, size_t count, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
      return reduce_as<int8_t>(into, with, count, op);
    case HCCL_DATA_TYPE_INT16:
      return reduce_as<int16_t>(into, with, count, op);
    case HCCL_DATA_TYPE_INT32:
      return reduce_as<int32_t>(into, with, count, op);
    case HCCL_DATA_TYPE_INT64:
      return reduce_as<int64_t>(into, with, count, op);
    case HCCL_DATA_TYPE_FP16:
      return reduce_as<_Float16>(into, with, count, op);
    case HCCL_DATA_TYPE_FP32:
      return reduce_as<float>(into, with, count, op);
    case HCCL_DATA_TYPE_BFP16:
      return reduce_as<BFloat16>(into, with, count, op);
    default:
      return false;
  }
}
