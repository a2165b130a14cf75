#include "streams.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace simulated_npu {
namespace {

int n_devices = 8;
std::atomic<bool> delayed{false};
std::atomic<bool> waits{true};
thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kMostDevices> this_stream{};
std::atomic<c10::StreamId> next_stream{1};

struct Queue {
  std::deque<Task> tasks;
  uint64_t submitted = 0;
  uint64_t done = 0;
};
using Key = std::pair<c10::DeviceIndex, c10::StreamId>;

// All that is queued, in all streams. One thread at a time runs tasks, which may wait themselves; others go on submitting.
struct Queues {
  std::mutex mutex;  // of all below; never held while a task runs
  std::map<Key, Queue> streams;
  std::map<uint64_t, Mark> collectives;  // launched and not run, by their order
  uint64_t next_collective = 0;
  uint64_t activity = 0;  // calls from outside

  std::recursive_mutex running;
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

// Runs the next task of a stream, if it has not come as far as `mark`; returns whether there was one.
bool run_next(const Mark& mark) {
  auto& all = queues();
  Queue* queue;
  Task task;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    queue = &all.streams[{mark.device, mark.stream}];
    if (queue->done >= mark.position || queue->tasks.empty()) return false;
    task = std::move(queue->tasks.front());
    queue->tasks.pop_front();
  }
  struct Count {
    Queue* queue;
    ~Count() {  // also where the task throws, to whoever waits for it
      std::lock_guard<std::mutex> lock(queues().mutex);
      queue->done++;
    }
  } count{queue};
  Bare bare;
  task();
  return true;
}

std::optional<Mark> oldest_collective() {
  auto& all = queues();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.collectives.empty() ? std::nullopt : std::optional<Mark>(all.collectives.begin()->second);
}

// Other ranks wait for this one's collectives also while its host waits for something else, a store or a file: where
// nothing was asked of the device for a while, the oldest collective runs.
void run_collectives_when_idle() {
  uint64_t seen = 0;
  while (true) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    uint64_t now;
    {
      std::lock_guard<std::mutex> lock(queues().mutex);
      now = queues().activity;
    }
    if (std::exchange(seen, now) != now) continue;
    if (auto collective = oldest_collective()) {
      try {
        wait_for(*collective);
      } catch (const std::exception&) {  // such as a rank that is gone: whoever waits on the host finds out
      }
    }
  }
}

void submit_locked(Queues& all, c10::DeviceIndex device, c10::StreamId stream, Task task) {
  auto& queue = all.streams[{device, stream}];
  queue.tasks.push_back(std::move(task));
  queue.submitted++;
  all.activity++;
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
  static bool watched = false;
  if (on && !std::exchange(watched, true)) std::thread(run_collectives_when_idle).detach();
}
bool is_delayed() { return delayed; }
void set_waits(bool on) { waits = on; }

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
  std::lock_guard<std::mutex> lock(all.mutex);
  submit_locked(all, device, stream, std::move(task));
}

void submit_collective(c10::DeviceIndex device, c10::StreamId stream, Task task) {
  if (!delayed) return submit(device, stream, std::move(task));
  auto& all = queues();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto order = all.next_collective++;
  const auto in_order = [order, task = std::move(task)] {
    const auto is_first = [order] {
      std::lock_guard<std::mutex> lock(queues().mutex);
      return queues().collectives.begin()->first == order;
    };
    while (!is_first()) wait_for(*oldest_collective());
    {
      std::lock_guard<std::mutex> lock(queues().mutex);
      queues().collectives.erase(order);
    }
    task();
  };
  submit_locked(all, device, stream, in_order);
  all.collectives[order] = {device, stream, all.streams[{device, stream}].submitted};
}

void submit_wait(c10::DeviceIndex device, c10::StreamId stream, const Mark& mark) {
  if (delayed && waits && !is_done(mark)) submit(device, stream, [mark] { wait_for(mark); });
}

Mark mark(c10::DeviceIndex device, c10::StreamId stream) {
  auto& all = queues();
  std::lock_guard<std::mutex> lock(all.mutex);
  return {device, stream, all.streams[{device, stream}].submitted};
}

bool is_done(const Mark& mark) {
  auto& all = queues();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.streams[{mark.device, mark.stream}].done >= mark.position;
}

void wait_for(const Mark& mark) {
  std::lock_guard<std::recursive_mutex> lock(queues().running);
  while (run_next(mark)) continue;
}

void advance(const Mark& mark) {
  std::lock_guard<std::recursive_mutex> lock(queues().running);
  run_next(mark);
}

void wait_for_stream(c10::DeviceIndex device, c10::StreamId stream) { wait_for(mark(device, stream)); }
void wait_for_current_stream() { wait_for_stream(this_device, this_stream[this_device]); }

void wait_for_device(c10::DeviceIndex device) {
  std::vector<Mark> ends;
  {
    auto& all = queues();
    std::lock_guard<std::mutex> lock(all.mutex);
    for (auto& [key, queue] : all.streams)
      if (key.first == device) ends.push_back({key.first, key.second, queue.submitted});
  }
  for (const auto& end : ends) wait_for(end);
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
