#include "random.h"

#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

namespace simulated_npu {
namespace {

struct NPUGenerator final : c10::GeneratorImpl {
  NPUGenerator(c10::DeviceIndex device, at::Generator generator)
      : GeneratorImpl(c10::Device(kNPU, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(generator)) {}

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  NPUGenerator* clone_impl() const override { return new NPUGenerator(device_.index(), cpu.clone()); }

  at::Generator cpu;
};

at::Generator make_npu_generator(c10::DeviceIndex device) {
  return at::make_generator<NPUGenerator>(device, at::detail::createCPUGenerator());
}

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < kMostDevices; index++) made->push_back(make_npu_generator(index));
    return made;
  }();
  return generators->at(device_or_current(device));
}
at::Generator new_generator(c10::DeviceIndex device) { return make_npu_generator(device_or_current(device)); }
at::Generator cpu_generator(const at::Generator& npu) {
  return static_cast<NPUGenerator*>(npu.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace simulated_npu
