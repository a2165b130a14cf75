// Pinned host memory.
#pragma once
#include <c10/core/Allocator.h>

namespace simulated_npu {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
size_t pinned_bytes();

}  // namespace simulated_npu
