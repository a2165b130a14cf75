// What PyTorch asks of the accelerator that it was built without.
#include "hooks.h"

#include "allocator.h"
#include "pinned.h"
#include "random.h"
#include "streams.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Storage.h>

#include <cstring>

namespace simulated_npu {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = current_device();
    set_current_device(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void* data) const override { return {kNPU, allocator().device_of(data)}; }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

void resize_storage(const c10::Storage& storage, size_t bytes) {
  On on(storage.device().index());
  auto data = allocator().allocate(bytes);
  if (bytes && storage.nbytes()) allocator().copy_data(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
  auto* changed = storage.unsafeGetStorageImpl();
  changed->set_data_ptr_noswap(std::move(data));
  changed->set_nbytes(bytes);
}

void register_hooks() {
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace simulated_npu
