// Every operator as the CPU's kernel on the same bytes.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <map>
#include <string>

namespace simulated_npu {

void run_on_cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// How often each operator ran, since counting was switched on; and those that delayed mode could not delay.
void count_operators(bool on);
std::map<std::string, int64_t> operator_counts();
std::map<std::string, int64_t> undelayed_counts();

}  // namespace simulated_npu
