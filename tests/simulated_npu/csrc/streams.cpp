#include "streams.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

namespace simulated_npu {
namespace {

int n_devices = 8;
std::atomic<bool> delayed{false};
thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kMostDevices> this_stream{};
std::atomic<c10::StreamId> next_stream{1};

struct Queue {
  std::deque<Task> tasks;
  uint64_t submitted = 0;
  uint64_t done = 0;
};
using Key = std::pair<c10::DeviceIndex, c10::StreamId>;

// All that is queued, in all streams. Tasks run while the lock is held, by whichever thread waits, and may wait themselves.
struct Queues {
  std::recursive_mutex mutex;
  std::map<Key, Queue> streams;
  std::map<uint64_t, Mark> collectives;  // launched and not run, by their order
  uint64_t next_collective = 0;
};

Queues& queues() {
  static auto* all = new Queues;  // left alone at exit, when other threads may still look at it
  return *all;
}

// Tasks call CPU kernels for nobody's autograd, autocast or Python mode, whoever's thread runs them.
struct Bare {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::autocast_dispatch_keyset | c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

void run_first(Queue& queue) {
  Task task = std::move(queue.tasks.front());
  queue.tasks.pop_front();
  struct Count {
    Queue& queue;
    ~Count() { queue.done++; }  // also where the task throws, to whoever waits for it
  } count{queue};
  Bare bare;
  task();
}

void run_until(Queue& queue, uint64_t position) {
  while (queue.done < position && !queue.tasks.empty()) run_first(queue);
}

}  // namespace

void set_device_count(int count) {
  TORCH_CHECK(count >= 0 && count <= kMostDevices, "between 0 and ", kMostDevices, " devices can be simulated, not ", count);
  n_devices = count;
}
int device_count() { return n_devices; }
c10::DeviceIndex current_device() { return this_device; }
void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device < n_devices, "invalid device ordinal npu:", int(device), ", there are ", n_devices);
  if (device >= 0) this_device = device;
}
c10::DeviceIndex device_or_current(c10::DeviceIndex device) { return device < 0 ? this_device : device; }

void set_delayed(bool on) {
  for (int device = 0; device < n_devices; device++) wait_for_device(device);
  delayed = on;
}
bool is_delayed() { return delayed; }

c10::StreamId current_stream(c10::DeviceIndex device) { return this_stream[device]; }
c10::StreamId exchange_stream(c10::DeviceIndex device, c10::StreamId stream) {
  return std::exchange(this_stream[device], stream);
}
c10::StreamId new_stream() { return next_stream++; }

void submit(c10::DeviceIndex device, c10::StreamId stream, Task task) {
  if (!delayed) {
    Bare bare;
    task();
    return;
  }
  auto& all = queues();
  std::lock_guard<std::recursive_mutex> lock(all.mutex);
  auto& queue = all.streams[{device, stream}];
  queue.tasks.push_back(std::move(task));
  queue.submitted++;
}

void submit_collective(c10::DeviceIndex device, c10::StreamId stream, Task task) {
  if (!delayed) return submit(device, stream, std::move(task));
  auto& all = queues();
  std::lock_guard<std::recursive_mutex> lock(all.mutex);
  const auto order = all.next_collective++;
  submit(device, stream, [order, task = std::move(task)] {
    auto& pending = queues().collectives;
    while (pending.begin()->first < order) wait_for(Mark(pending.begin()->second));
    pending.erase(order);
    task();
  });
  all.collectives[order] = mark(device, stream);
}

void submit_wait(c10::DeviceIndex device, c10::StreamId stream, const Mark& mark) {
  if (delayed && !is_done(mark)) submit(device, stream, [mark] { wait_for(mark); });
}

Mark mark(c10::DeviceIndex device, c10::StreamId stream) {
  auto& all = queues();
  std::lock_guard<std::recursive_mutex> lock(all.mutex);
  return {device, stream, all.streams[{device, stream}].submitted};
}

bool is_done(const Mark& mark) {
  auto& all = queues();
  std::lock_guard<std::recursive_mutex> lock(all.mutex);
  return all.streams[{mark.device, mark.stream}].done >= mark.position;
}

void wait_for(const Mark& mark) {
  auto& all = queues();
  std::lock_guard<std::recursive_mutex> lock(all.mutex);
  run_until(all.streams[{mark.device, mark.stream}], mark.position);
}

void advance(const Mark& mark) {
  auto& all = queues();
  std::lock_guard<std::recursive_mutex> lock(all.mutex);
  auto& queue = all.streams[{mark.device, mark.stream}];
  if (queue.done < mark.position && !queue.tasks.empty()) run_first(queue);
}

void wait_for_stream(c10::DeviceIndex device, c10::StreamId stream) { wait_for(mark(device, stream)); }
void wait_for_current_stream() { wait_for_stream(this_device, this_stream[this_device]); }

void wait_for_device(c10::DeviceIndex device) {
  auto& all = queues();
  std::lock_guard<std::recursive_mutex> lock(all.mutex);
  for (auto& [key, queue] : all.streams)
    if (key.first == device) run_until(queue, queue.submitted);
}

On::On(c10::DeviceIndex device) : old_device_(this_device), device_(device_or_current(device)) {
  set_current_device(device_);
  old_stream_ = this_stream[device_];
}
On::On(c10::DeviceIndex device, c10::StreamId stream) : old_device_(this_device), device_(device) {
  set_current_device(device);
  old_stream_ = exchange_stream(device, stream);
}
On::~On() {
  this_stream[device_] = old_stream_;
  this_device = old_device_;
}

}  // namespace simulated_npu
