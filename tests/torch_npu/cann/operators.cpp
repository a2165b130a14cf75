// The operators that torch_npu's own C++ runs without PyTorch's dispatcher, where no host kernel can take their place:
// its collectives over lists of tensors clear and copy their buffers so. Any other operator is refused by name, for one
// that passes silently leaves memory that nobody wrote.
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "stub.h"

struct aclTensorDesc {
  aclDataType type;
  std::vector<int64_t> sizes;
  aclFormat format;

  size_t elements() const { return std::accumulate(sizes.begin(), sizes.end(), size_t{1}, std::multiplies<>()); }
};

struct aclDataBuffer {
  void* data;
  size_t bytes;
};

struct aclopAttr {};

namespace {

struct Operand {
  const aclTensorDesc& desc;
  const aclDataBuffer& buffer;

  size_t elements() const { return desc.elements(); }
  size_t width() const { return aclDataTypeSize(desc.type); }
  char* at(size_t element) const { return static_cast<char*>(buffer.data) + element * width(); }
  bool fits() const { return elements() * width() <= buffer.bytes; }

  std::string describe() const {
    std::string text = " type " + std::to_string(desc.type) + "[";
    for (int64_t size : desc.sizes) text += std::to_string(size) + ",";
    return text + "] in " + std::to_string(buffer.bytes) + " bytes;";
  }

  int64_t number(size_t element) const {
    if (desc.type == ACL_INT32) return *reinterpret_cast<int32_t*>(at(element));
    return *reinterpret_cast<int64_t*>(at(element));
  }
};

void fill(const Operand& out, size_t first, size_t last, const Operand& value) {
  for (size_t i = first; i < last; i++) std::memcpy(out.at(i), value.at(0), out.width());
}

// Operator "PadV3" of the last dim: what is before each row of the input, and after it, has the one value.
bool pad(const Operand& out, const Operand& input, const Operand& amounts, const Operand& value) {
  size_t dims = input.desc.sizes.size();
  if (dims == 0 || amounts.elements() != 2 * dims || out.desc.sizes.size() != dims) return false;
  for (size_t dim = 0; dim + 1 < dims; dim++)
    if (input.desc.sizes[dim] != out.desc.sizes[dim]) return false;
  size_t columns = input.desc.sizes.back(), wide = out.desc.sizes.back(), before = amounts.number(2 * dims - 2);
  if (before + columns + amounts.number(2 * dims - 1) != wide) return false;
  fill(out, 0, out.elements(), value);
  for (size_t row = 0; columns && row < input.elements() / columns; row++)
    std::memcpy(out.at(row * wide + before), input.at(row * columns), columns * input.width());
  return true;
}

}  // namespace

extern "C" {

size_t aclDataTypeSize(aclDataType type) {
  switch (type) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
      return 1;
    case ACL_INT16:
    case ACL_UINT16:
    case ACL_FLOAT16:
    case ACL_BF16:
      return 2;
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_FLOAT:
      return 4;
    default:
      return 8;
  }
}

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int dims, const int64_t* sizes, aclFormat format) {
  return new aclTensorDesc{type, {sizes, sizes + dims}, format};
}

void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->sizes.size(); }

aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t dim, int64_t* size) {
  *size = desc->sizes.at(dim);
  return ACL_SUCCESS;
}

// The format and shape of storage, which differ from the tensor's own in private formats that nobody here asks for.
aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
void aclSetTensorDescName(aclTensorDesc*, const char*) {}

aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new aclDataBuffer{data, bytes}; }

aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attributes) { delete attributes; }

aclError aclopCompileAndExecute(const char* name, int inputs, const aclTensorDesc* const input_desc[],
                                const aclDataBuffer* const input[], int outputs, const aclTensorDesc* const output_desc[],
                                aclDataBuffer* const output[], const aclopAttr*, aclopEngineType, aclopCompileType,
                                const char*, aclrtStream) {
  std::vector<Operand> operands;
  bool fit = true;
  for (int i = 0; i < inputs; i++) operands.push_back({*input_desc[i], *input[i]});
  for (int i = 0; i < outputs; i++) operands.push_back({*output_desc[i], *output[i]});
  for (const auto& operand : operands) fit &= operand.fits();
  std::string wanted = name;
  if (fit && wanted == "Fill" && inputs == 2 && outputs == 1) {  // of sizes, which the output has too, and a value
    fill(operands[2], 0, operands[2].elements(), operands[1]);
    return ACL_SUCCESS;
  }
  if (fit && wanted == "PadV3" && inputs == 3 && outputs == 1 && pad(operands[3], operands[0], operands[1], operands[2]))
    return ACL_SUCCESS;
  std::string text;
  for (const auto& operand : operands) text += operand.describe();
  return stub_refuse(ACL_ERROR_OP_NOT_FOUND, "operator %s has no host kernel for%s", name, text.c_str());
}

aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 1; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  if (length) value[0] = 0;
  return ACL_SUCCESS;
}

}  // extern "C"
