// What c10 asks of a device: which one is current, its streams, its events.
#include "allocator.h"
#include "streams.h"
#include "waits.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <memory>

namespace simulated_npu {
namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  Mark place;
  std::shared_ptr<Clock::time_point> reached = std::make_shared<Clock::time_point>();  // written by the stream
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNPU; }

  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old = getDevice();
    set_current_device(device.index());
    return old;
  }
  c10::Device getDevice() const override { return {kNPU, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < device_count()) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream stream(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNPU, device_or_current(device.index())), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_stream(device_or_current(device.index())));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, new_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream(device, new_stream()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(next.device(), exchange_stream(next.device_index(), next.id()));
  }
  bool queryStream(const c10::Stream& asked) const override {
    Mark place = mark(asked.device_index(), asked.id());
    advance(place);
    return is_done(place);
  }
  void synchronizeStream(const c10::Stream& waited) const override {
    note_wait("Stream.synchronize");
    wait_for_stream(waited.device_index(), waited.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    note_wait("synchronize");
    wait_for_device(device_or_current(device));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& user) const override {
    allocator().recordStream(data, user);
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    auto& recorded = *static_cast<Event*>(*event);
    submit(on.device_index(), on.id(), [reached = recorded.reached] { *reached = Clock::now(); });
    recorded.place = mark(on.device_index(), on.id());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& waiting) const override {
    if (event) submit_wait(waiting.device_index(), waiting.id(), static_cast<Event*>(event)->place);
  }
  // Who asks again and again must see it happen at last: each question lets the stream do one thing.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    advance(static_cast<Event*>(event)->place);
    return is_done(static_cast<Event*>(event)->place);
  }
  void synchronizeEvent(void* event) const override {
    note_wait("Event.synchronize");
    if (event) wait_for(static_cast<Event*>(event)->place);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    for (void* event : {start, end})  // as on hardware, which has no time to give before
      TORCH_CHECK(event && is_done(static_cast<Event*>(event)->place), "both events must be completed before their time is calculated");
    const auto passed = *static_cast<Event*>(end)->reached - *static_cast<Event*>(start)->reached;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};

}  // namespace
}  // namespace simulated_npu

namespace at::detail {
using SimulatedNPUGuard = simulated_npu::Guard;
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimulatedNPUGuard)
}  // namespace at::detail
