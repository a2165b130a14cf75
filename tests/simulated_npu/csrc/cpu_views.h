// CPU tensors over the bytes of NPU tensors, and the way back.
#pragma once
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace simulated_npu {

inline bool is_npu(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// CPU views for one operator call: tensors that share a storage share its view. They do not own the bytes.
class CPUViews {
 public:
  at::Tensor view(const at::Tensor& npu);  // of the same shape; a tensor of another device is given back as it is
  // A result as an NPU tensor: a view of an argument where it is one, else a copy in new memory of the current device.
  at::Tensor to_npu(const at::Tensor& cpu) const;

 private:
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // NPU's and CPU's
};

// An NPU tensor over a storage, with the shape and flags of another tensor.
at::Tensor npu_tensor(const c10::Storage& storage, const at::Tensor& like);

}  // namespace simulated_npu
