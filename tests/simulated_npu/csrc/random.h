// Generators of random numbers: a CPU's, so that a seed gives the numbers that it gives on a CPU.
#pragma once
#include <ATen/core/Generator.h>

namespace simulated_npu {

const at::Generator& default_generator(c10::DeviceIndex device);  // -1: of the current device
at::Generator new_generator(c10::DeviceIndex device);
at::Generator cpu_generator(const at::Generator& npu);  // the one behind it

}  // namespace simulated_npu
