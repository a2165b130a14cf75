// What PyTorch asks of the accelerator that it was built without.
#pragma once
#include <c10/core/Storage.h>

namespace simulated_npu {

void register_hooks();
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace simulated_npu
