// Pinned host memory. A block lives until the last tensor and the last copy that use it are gone: copies hold it.
#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>

#include <cstdlib>
#include <mutex>
#include <map>

#include "pinned.h"

namespace simulated_npu {
namespace {

struct PinnedAllocator final : at::HostAllocator {
  std::mutex mutex;
  std::map<char*, size_t> live;

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator& pinned() {
  static auto* the_allocator = new PinnedAllocator;
  return *the_allocator;
}

void unpin(void* data) {
  {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().live.erase(static_cast<char*>(data));
  }
  std::free(data);
}

c10::DataPtr PinnedAllocator::allocate(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(bytes, 1)) == 0, "the host's memory ran out");
  std::lock_guard<std::mutex> lock(mutex);
  live[static_cast<char*>(data)] = bytes;
  return {data, data, &unpin, c10::Device(c10::kCPU)};
}
c10::DeleterFnPtr PinnedAllocator::raw_deleter() const { return &unpin; }

}  // namespace

c10::Allocator* pinned_allocator() { return &pinned(); }

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto after = pinned().live.upper_bound(static_cast<char*>(const_cast<void*>(data)));
  if (after == pinned().live.begin()) return false;
  auto [start, bytes] = *--after;
  return data == start || static_cast<const char*>(data) < start + bytes;
}

size_t pinned_bytes() {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  size_t sum = 0;
  for (auto [start, bytes] : pinned().live) sum += bytes;
  return sum;
}

}  // namespace simulated_npu

REGISTER_HOST_ALLOCATOR(simulated_npu::kNPU, static_cast<at::HostAllocator*>(simulated_npu::pinned_allocator()))
