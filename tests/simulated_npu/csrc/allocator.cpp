#include "allocator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <sstream>

namespace simulated_npu {
namespace {

constexpr unsigned char kPattern = 0xFF;
constexpr int kAll = 0;  // index of a statistic over small and large blocks

void free_device_memory(void* data) {
  if (data) allocator().free(data);
}

std::string gib(size_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << double(bytes) / double(1 << 30) << " GiB";
  return text.str();
}

int64_t now_us() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

}  // namespace

NPUAllocator& allocator() {
  static auto* the_allocator = new NPUAllocator;
  return *the_allocator;
}

c10::DataPtr NPUAllocator::allocate(size_t bytes) {
  const auto index = current_device();
  const auto stream = current_stream(index);
  const c10::Device where(kNPU, index);
  if (bytes == 0) return {nullptr, nullptr, &free_device_memory, where};
  const size_t rounded = (bytes + kRounding - 1) / kRounding * kRounding;
  auto frames = stack_ ? stack_() : nullptr;  // before the lock, for it may ask Python
  Block* block;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& device = devices_[index];
    return_finished(device);
    block = take_free(device, stream, rounded);
    const size_t limit = size_t(double(capacity_) * fractions_[index]);
    const auto fits = [&] { return size_t(device.stats.reserved_bytes[kAll].current) + rounded <= limit; };
    if (!block && !fits()) {
      device.stats.num_alloc_retries++;
      lock.unlock();
      wait_for_device(index);  // as on hardware, where memory goes back to the system only when nothing runs
      lock.lock();
      return_finished(device);
      release_cached(index);
      if (!fits()) {
        note(device, "oom", nullptr, bytes, stream, frames);
        out_of_memory(index, bytes, limit);
      }
    }
    if (!block) {
      void* address = nullptr;
      TORCH_CHECK(posix_memalign(&address, 64, rounded) == 0, "the host's memory ran out");
      auto made = std::make_unique<Block>();
      *made = {static_cast<char*>(address), rounded, 0, index, stream, {}};
      block = (blocks_[address] = std::move(made)).get();
      device.stats.num_device_alloc++;
      device.stats.segment[kAll].increase(1);
      device.stats.reserved_bytes[kAll].increase(rounded);
      note(device, "segment_alloc", address, rounded, stream, frames);
    }
    block->requested = bytes;
    device.stats.allocation[kAll].increase(1);
    device.stats.active[kAll].increase(1);
    device.stats.allocated_bytes[kAll].increase(block->bytes);
    device.stats.active_bytes[kAll].increase(block->bytes);
    device.stats.requested_bytes[kAll].increase(bytes);
    note(device, "alloc", block->address, block->bytes, stream, frames);
    if (frames) stacks_[block->address] = std::move(frames);
  }
  // By the stream, since what ran on it before may be reading the block that was freed.
  submit(index, stream, [block, bytes] { std::memset(block->address, kPattern, bytes); });
  return {block->address, block->address, &free_device_memory, where};
}

Block* NPUAllocator::take_free(PerDevice& device, c10::StreamId stream, size_t bytes) {
  auto& pool = device.pools[stream];
  auto found = pool.lower_bound(bytes);
  // Blocks are not split, so that one much too large stays for who needs it.
  if (found == pool.end() || found->first > bytes + std::max(bytes / 4, kRounding)) return nullptr;
  Block* block = found->second;
  pool.erase(found);
  return block;
}

void NPUAllocator::free(void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto* block = blocks_.at(data).get();
  auto& device = devices_[block->device];
  device.stats.allocation[kAll].decrease(1);
  device.stats.allocated_bytes[kAll].decrease(block->bytes);
  device.stats.requested_bytes[kAll].decrease(block->requested);
  note(device, "free_requested", data, block->bytes, block->stream, nullptr);
  stacks_.erase(data);
  std::vector<Mark> users;
  for (auto stream : block->users) users.push_back(mark(block->device, stream));
  block->users.clear();
  if (users.empty()) {
    put_into_pool(device, block);
  } else {
    device.waiting.emplace_back(block, std::move(users));
  }
}

void NPUAllocator::put_into_pool(PerDevice& device, Block* block) {
  device.stats.active[kAll].decrease(1);
  device.stats.active_bytes[kAll].decrease(block->bytes);
  note(device, "free_completed", block->address, block->bytes, block->stream, nullptr);
  block->requested = 0;
  device.pools[block->stream].emplace(block->bytes, block);
}

void NPUAllocator::return_finished(PerDevice& device) {
  auto& waiting = device.waiting;
  for (size_t i = 0; i < waiting.size();) {
    bool done = true;
    for (const auto& user : waiting[i].second) done = done && is_done(user);
    if (!done) {
      i++;
      continue;
    }
    put_into_pool(device, waiting[i].first);
    waiting.erase(waiting.begin() + i);
  }
}

void NPUAllocator::release_cached(c10::DeviceIndex index) {
  auto& device = devices_[index];
  for (auto& [stream, pool] : device.pools) {
    for (auto& [bytes, block] : pool) {
      device.stats.segment[kAll].decrease(1);
      device.stats.reserved_bytes[kAll].decrease(bytes);
      device.stats.num_device_free++;
      note(device, "segment_free", block->address, bytes, stream, nullptr);
      std::free(block->address);
      blocks_.erase(block->address);
    }
    pool.clear();
  }
}

void NPUAllocator::emptyCache(c10::MempoolId_t) {
  for (int index = 0; index < device_count(); index++) {
    wait_for_device(index);
    std::lock_guard<std::mutex> lock(mutex_);
    return_finished(devices_[index]);
    release_cached(index);
  }
}

void NPUAllocator::recordStream(const c10::DataPtr& data, c10::Stream user) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = blocks_.find(data.get());
  if (found == blocks_.end() || found->second->stream == user.id()) return;
  auto& users = found->second->users;
  if (std::find(users.begin(), users.end(), user.id()) == users.end()) users.push_back(user.id());
}

void NPUAllocator::out_of_memory(c10::DeviceIndex index, size_t bytes, size_t limit) {
  auto& stats = devices_[index].stats;
  stats.num_ooms++;
  const size_t reserved = stats.reserved_bytes[kAll].current;
  // In the words of torch_npu, which reports of such failures are read for.
  TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", gib(bytes), " (NPU ", int(index), "; ",
                   gib(capacity_), " total capacity; ", gib(stats.allocated_bytes[kAll].current), " already allocated; ",
                   gib(stats.active_bytes[kAll].current), " current active; ", gib(limit - reserved), " free; ",
                   gib(reserved), " reserved in total by PyTorch)");
}

c10::DeviceIndex NPUAllocator::device_of(const void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = blocks_.find(data);
  TORCH_CHECK(found != blocks_.end(), "this is not the start of npu memory");
  return found->second->device;
}

c10::CachingDeviceAllocator::DeviceStats NPUAllocator::getDeviceStats(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> lock(mutex_);
  return devices_[index].stats;
}

namespace {
template <class Change>
void each_statistic(c10::CachingDeviceAllocator::DeviceStats& stats, Change change) {
  for (auto* kinds : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                      &stats.active_bytes, &stats.requested_bytes})
    change((*kinds)[kAll]);
}
}  // namespace

void NPUAllocator::resetAccumulatedStats(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> lock(mutex_);
  each_statistic(devices_[index].stats, [](auto& statistic) { statistic.reset_accumulated(); });
}
void NPUAllocator::resetPeakStats(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> lock(mutex_);
  each_statistic(devices_[index].stats, [](auto& statistic) { statistic.reset_peak(); });
}
std::pair<size_t, size_t> NPUAllocator::getMemoryInfo(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> lock(mutex_);
  return {capacity_ - devices_[index].stats.reserved_bytes[kAll].current, capacity_};
}

void NPUAllocator::set_history(Stack stack, size_t most_entries) {
  std::lock_guard<std::mutex> lock(mutex_);
  stack_ = stack;
  most_entries_ = most_entries;
  for (auto& device : devices_) {
    device.history.clear();
    device.oldest = 0;
  }
}

void NPUAllocator::note(PerDevice& device, const char* action, const void* address, size_t bytes, c10::StreamId stream,
                        Frames frames) {
  if (!stack_) return;
  HistoryEntry entry{action, reinterpret_cast<size_t>(address), bytes, stream, now_us(), std::move(frames)};
  if (device.history.size() < most_entries_) {
    device.history.push_back(std::move(entry));
  } else {
    device.history[device.oldest++ % most_entries_] = std::move(entry);
  }
}

std::vector<HistoryEntry> NPUAllocator::history(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto entries = devices_[index].history;
  if (!entries.empty()) std::rotate(entries.begin(), entries.begin() + devices_[index].oldest % entries.size(), entries.end());
  return entries;
}

std::vector<std::pair<Block, Frames>> NPUAllocator::blocks(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<Block, Frames>> all;
  for (auto& [address, block] : blocks_) {
    if (block->device != index) continue;
    auto stack = stacks_.find(address);
    all.emplace_back(*block, stack == stacks_.end() ? nullptr : stack->second);
  }
  return all;
}

void NPUAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  const auto device = current_device();
  submit(device, current_stream(device), [=] { std::memcpy(to, from, bytes); });
}
c10::DeleterFnPtr NPUAllocator::raw_deleter() const { return &free_device_memory; }

}  // namespace simulated_npu

REGISTER_ALLOCATOR(simulated_npu::kNPU, &simulated_npu::allocator())
