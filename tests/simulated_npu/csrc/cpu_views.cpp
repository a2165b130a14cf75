#include "cpu_views.h"

#include "allocator.h"

#include <ATen/core/TensorBase.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace simulated_npu {
namespace {

at::Tensor tensor_over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

c10::Storage storage_over(c10::DataPtr data, size_t bytes, c10::Allocator* resized_by) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t{}, bytes, std::move(data), resized_by, true);
}

}  // namespace

at::Tensor CPUViews::view(const at::Tensor& npu) {
  if (!is_npu(npu)) return npu;
  for (auto& [theirs, ours] : storages_)
    if (theirs.is_alias_of(npu.storage())) return tensor_over(ours, c10::DispatchKey::CPU, npu);
  const auto& storage = npu.storage();
  // The same bytes, and nothing to do when the view is gone.
  c10::DataPtr bytes(const_cast<void*>(storage.data()), nullptr, [](void*) {}, c10::Device(c10::kCPU));
  storages_.emplace_back(storage, storage_over(std::move(bytes), storage.nbytes(), c10::GetCPUAllocator()));
  return tensor_over(storages_.back().second, c10::DispatchKey::CPU, npu);
}

at::Tensor CPUViews::to_npu(const at::Tensor& cpu) const {
  if (!cpu.defined() || !cpu.is_cpu()) return cpu;
  for (const auto& [theirs, ours] : storages_)
    if (ours.is_alias_of(cpu.storage())) return npu_tensor(theirs, cpu);
  const size_t bytes = cpu.storage().nbytes();
  auto storage = storage_over(allocator().allocate(bytes), bytes, &allocator());
  if (bytes) {
    wait_for_current_stream();  // the pattern of new memory comes before what is written here
    std::memcpy(storage.mutable_data(), cpu.storage().data(), bytes);
  }
  return npu_tensor(storage, cpu);
}

at::Tensor npu_tensor(const c10::Storage& storage, const at::Tensor& like) {
  return tensor_over(storage, c10::DispatchKey::PrivateUse1, like);
}

}  // namespace simulated_npu
