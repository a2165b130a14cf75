// The backend `hccl`: collectives of NPU tensors by another backend (gloo) on the same bytes.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulated_npu {

c10::intrusive_ptr<c10d::Backend> make_hccl(c10::intrusive_ptr<c10d::Backend> inner);

}  // namespace simulated_npu
