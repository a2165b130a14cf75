// Devices, streams and events. Work that is given to a stream runs at once, or, in delayed mode, as late as it may.
//
// Delayed mode is the worst that asynchronous hardware may do: nothing runs until somebody waits for it, and then only
// what is waited for, in the order of its own stream. A stream that forgets to wait for another one reads what the
// other has not written yet, on every run.
//
// Two things are less than the worst, because ranks would wait for each other for ever: collectives run in the order in
// which they were launched, whichever stream they are on; and they run, with what they wait for, when nothing has been
// asked of the device for a tenth of a second.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>

namespace simulated_npu {

constexpr auto kNPU = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 16;

void set_device_count(int count);
int device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);  // throws where there is no such device
c10::DeviceIndex device_or_current(c10::DeviceIndex device);  // -1: the current one

// A place in a stream: what was given to it before.
struct Mark {
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
  uint64_t position = 0;
};

using Task = std::function<void()>;

void set_delayed(bool delayed);
bool is_delayed();
void set_waits(bool on);  // off: streams wait for nothing, a fault that tests must be able to see

c10::StreamId current_stream(c10::DeviceIndex device);
c10::StreamId exchange_stream(c10::DeviceIndex device, c10::StreamId stream);  // returns the previous one
c10::StreamId new_stream();

void submit(c10::DeviceIndex device, c10::StreamId stream, Task task);
void submit_collective(c10::DeviceIndex device, c10::StreamId stream, Task task);
void submit_wait(c10::DeviceIndex device, c10::StreamId stream, const Mark& mark);
Mark mark(c10::DeviceIndex device, c10::StreamId stream);

bool is_done(const Mark& mark);
void wait_for(const Mark& mark);  // on the host
void advance(const Mark& mark);   // runs one task of what is waited for
void wait_for_stream(c10::DeviceIndex device, c10::StreamId stream);
void wait_for_current_stream();
void wait_for_device(c10::DeviceIndex device);

// Makes a device and one of its streams current within a scope.
class On {
 public:
  explicit On(c10::DeviceIndex device);
  On(c10::DeviceIndex device, c10::StreamId stream);
  ~On();
  On(const On&) = delete;

 private:
  c10::DeviceIndex old_device_;
  c10::DeviceIndex device_;
  c10::StreamId old_stream_;
};

}  // namespace simulated_npu
