// Operators for the real torch_npu without an NPU: each of its aten kernels gives way to the CPU's, on the same bytes.
//
// A tensor of the device becomes, for the call, a CPU tensor over its storage; what comes back is either one of those,
// or a view of one, or new, and then its bytes are copied into memory of torch_npu's allocator. So allocation, storages,
// views and autograd stay torch_npu's own. Random numbers come from a CPU generator that the NPU's seeds.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using OptionalTensor = std::optional<Tensor>;

constexpr auto NPU = c10::DeviceType::PrivateUse1;

bool is_npu(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == NPU; }

// The tensors of one call: on the device, and on the host over the same bytes.
class Call {
 public:
  Tensor to_host(const Tensor& tensor, bool written) {
    if (!is_npu(tensor)) return tensor;
    device_ = tensor.device();
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        host_storage(tensor), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = host.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    host._set_conj(tensor.is_conj());
    host._set_neg(tensor.is_neg());
    tensors_.push_back({tensor, host, written});
    return host;
  }

  // Outputs that the kernel has resized lie in memory of the host's allocator.
  void take_back_resized() {
    for (auto& [tensor, host, written] : tensors_) {
      if (!written || !host.numel()) continue;
      if (tensor.sizes() != host.sizes()) tensor.resize_(host.sizes());
      if (host.storage().data() != tensor.storage().data())
        std::memcpy(tensor.mutable_data_ptr(), host.contiguous().const_data_ptr(), host.nbytes());
    }
  }

  Tensor to_device(const Tensor& host) {
    if (!host.defined() || is_npu(host)) return host;
    for (auto& [tensor, own, written] : tensors_)
      if (own.is_same(host)) return tensor;
    for (auto& [tensor, own, written] : tensors_)
      if (own.storage().is_alias_of(host.storage()) && own.storage().data() == tensor.storage().data())
        return view(tensor, host);
    Tensor dense = host.is_non_overlapping_and_dense() ? host : host.contiguous();
    auto made = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(device_));
    if (dense.numel()) std::memcpy(made.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
    return made;
  }

  void set_device(c10::Device device) { device_ = device; }

 private:
  struct Pair {
    Tensor tensor, host;
    bool written;
  };

  c10::Storage host_storage(const Tensor& tensor) {
    for (auto& pair : tensors_)
      if (pair.tensor.storage().is_alias_of(tensor.storage())) return pair.host.storage();
    auto* kept = new c10::Storage(tensor.storage());
    c10::DataPtr data(kept->mutable_data(), kept, [](void* held) { delete static_cast<c10::Storage*>(held); },
                      c10::Device(c10::kCPU));
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t{}, kept->nbytes(), std::move(data),
                                                 c10::GetAllocator(c10::kCPU), true);
  }

  static Tensor view(const Tensor& tensor, const Tensor& host) {
    if (tensor.scalar_type() == host.scalar_type())
      return tensor.as_strided(host.sizes(), host.strides(), host.storage_offset());
    auto other = at::empty({0}, tensor.options().dtype(host.scalar_type()));
    return other.set_(tensor.storage(), host.storage_offset(), host.sizes(), host.strides());
  }

  std::vector<Pair> tensors_;
  c10::Device device_{NPU};
};

at::Generator host_generator(at::Generator generator) {
  std::lock_guard<std::mutex> held(generator.mutex());
  auto* npu = generator.unsafeGetGeneratorImpl();
  auto offset = npu->get_offset();
  npu->set_offset(offset + 4);
  return at::make_generator<at::CPUGeneratorImpl>(npu->current_seed() + 0x9E3779B97F4A7C15ull * (offset + 1));
}

template <typename T, typename F>
IValue each(const c10::List<T>& list, F swap) {
  c10::List<T> swapped;
  for (T item : list) swapped.push_back(swap(item));
  return swapped;
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  auto first = stack->size() - arguments.size();
  Call call;
  bool on_device = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    IValue& value = (*stack)[first + i];
    bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    auto swap = [&](const Tensor& tensor) {
      on_device |= is_npu(tensor);
      return call.to_host(tensor, written);
    };
    if (value.isTensor()) {
      value = swap(value.toTensor());
    } else if (value.isTensorList()) {
      value = each<Tensor>(value.toTensorList(), swap);
    } else if (value.isOptionalTensorList()) {
      value = each<OptionalTensor>(value.toOptionalTensorList(), [&](const OptionalTensor& tensor) {
        return tensor.has_value() ? OptionalTensor(swap(*tensor)) : tensor;
      });
    } else if (value.isDevice() && value.toDevice().type() == NPU) {
      call.set_device(value.toDevice());
      value = c10::Device(c10::kCPU);
      on_device = true;
    }
  }
  for (size_t i = 0; i < arguments.size(); i++) {  // after the tensors, which tell the device
    IValue& value = (*stack)[first + i];
    if (arguments[i].name() != "generator" || !on_device) continue;
    if (value.isNone()) value = host_generator(at::globalContext().defaultGenerator(c10::Device(NPU)));
    else if (value.toGenerator().device().type() == NPU) value = host_generator(value.toGenerator());
  }
  // Copies and collectives wait in torch_npu's queue for a thread of its own; a kernel must not overtake them.
  if (on_device) c10_npu::npuSynchronizeDevice(true);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.take_back_resized();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    auto back = [&](const Tensor& host) { return call.to_device(host); };
    if (value.isTensor()) value = back(value.toTensor());
    else if (value.isTensorList()) value = each<Tensor>(value.toTensorList(), back);
  }
}

// PyTorch's own composition of other operators, on the device's tensors as they are.
void compose(const c10::OperatorHandle& op, Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void compose_with_autograd(const c10::OperatorHandle& op, Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), stack);
}

// What F.scaled_dot_product_attention chooses on a CPU without dropout; torch_npu's takes its own fused operator.
Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask, double dropout,
              bool causal, std::optional<double> scale, bool) {
  TORCH_CHECK(dropout == 0.0, "the host's attention has no dropout");
  return std::get<0>(
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, mask, scale));
}

using Names = std::vector<std::string>;
std::vector<std::unique_ptr<torch::Library>> libraries;

torch::Library& library(c10::DispatchKey key) {
  libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
  return *libraries.back();
}

template <c10::BoxedKernel::BoxedKernelFunction* kernel>
void put(torch::Library& into, const Names& names) {
  for (auto& name : names) into.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
}

void install(const Names& on_host, const Names& composed, const Names& composed_with_autograd) {
  auto& kernels = library(c10::DispatchKey::PrivateUse1);
  put<&run_on_host>(kernels, on_host);
  put<&compose>(kernels, composed);
  auto& autograd = library(c10::DispatchKey::AutogradPrivateUse1);
  put<&compose_with_autograd>(autograd, composed_with_autograd);
  autograd.impl("scaled_dot_product_attention", attend);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("install", &install); }
