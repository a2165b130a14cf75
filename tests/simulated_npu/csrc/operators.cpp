// What does not come from the CPU: making tensors, copies between host and device, storages, and attention's choice.
#include "allocator.h"
#include "cpu_views.h"
#include "fallback.h"
#include "pinned.h"
#include "streams.h"
#include "waits.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/SDPBackend.h>
#include <torch/library.h>

namespace simulated_npu {
namespace {

using at::Tensor;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ------------------------------------------------------------------------------------------------ making tensors

c10::DeviceIndex index_of(const std::optional<c10::Device>& device) { return device ? device->index() : -1; }

Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  On on(index_of(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  On on(index_of(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

// ------------------------------------------------------------------------------------------------ copies

// What a CPU's tensor holds now, for a copy that comes later; pinned memory is read by the device when the copy runs.
Tensor source_for_later(const Tensor& cpu, bool non_blocking) {
  return non_blocking && is_pinned(cpu.const_data_ptr()) ? at::alias(cpu) : cpu.clone();
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  TORCH_CHECK(from.device() == to.device() || from.is_cpu() || to.is_cpu(), "one npu's tensor is copied to another through the CPU");
  On on(is_npu(to) ? to.device().index() : from.device().index());
  CPUViews views;
  const auto source = is_npu(from) || !is_delayed() ? views.view(from) : source_for_later(from, non_blocking);
  const auto target = is_npu(to) ? views.view(to) : at::alias(to);  // `to` may be given other data by then
  submit(current_device(), current_stream(current_device()), [source, target] { target.copy_(source); });
  const bool pinned = (to.is_cpu() && is_pinned(to.const_data_ptr())) || (from.is_cpu() && is_pinned(from.const_data_ptr()));
  if (to.is_cpu() != from.is_cpu() && !(non_blocking && pinned)) note_wait(to.is_cpu() ? "copy to the host" : "copy to the device");
  const bool host_waits = to.is_cpu() ? !(non_blocking && is_pinned(to.const_data_ptr())) : from.is_cpu() && !non_blocking;
  if (host_waits) wait_for_current_stream();
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// ------------------------------------------------------------------------------------------------ storages

Tensor& set_storage(Tensor& tensor, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.data() && stride.size() == size.size()) {
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  } else {
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  }
  impl->set_storage_offset(offset.expect_int());
  return tensor;
}
Tensor& set_whole_storage(Tensor& tensor, c10::Storage storage) {
  const int64_t elements = storage.nbytes() / tensor.itemsize();
  return set_storage(tensor, std::move(storage), 0, {c10::SymInt(elements)}, {});
}
Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}
void record_stream(Tensor& tensor, c10::Stream user) { allocator().recordStream(tensor.storage().data_ptr(), user); }

// `parameter.data = tensor` may cross from the CPU to the device and back, as under torch_npu.
bool may_take_data_of(const Tensor& tensor, const Tensor& other) {
  const auto plain = [](const Tensor& t) { return t.layout() == c10::kStrided && (t.is_cpu() || is_npu(t)); };
  return plain(tensor) && plain(other);
}

// ------------------------------------------------------------------------------------------------ attention

// PyTorch chooses by the type of the device; this chooses as it does on a CPU.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
                 bool causal, std::optional<double> scale, bool grouped_query) {
  const auto choice = at::_fused_sdp_choice(query, key, value, mask, dropout, causal, scale, grouped_query);
  if (choice == int64_t(at::SDPBackend::flash_attention)) {
    std::optional<Tensor> added = mask;
    if (mask && mask->defined() && mask->scalar_type() == at::kBool) {
      const auto options = query.options();
      added = at::where(*mask, at::scalar_tensor(0, options), at::scalar_tensor(-std::numeric_limits<double>::infinity(), options));
    }
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, added, scale));
  }
  return std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, std::nullopt, scale, grouped_query));
}

}  // namespace
}  // namespace simulated_npu

using namespace simulated_npu;

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu_kernel>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
  m.impl("scaled_dot_product_attention", &attention);
}

// Autocast casts for the operators for which it does on other accelerators.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
#define CAST_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define CAST_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(CAST_LOWER)
  AT_FORALL_FP32(CAST_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET_DTYPE)
  AT_FORALL_PROMOTE(PROMOTE)
}
