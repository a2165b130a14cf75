// The device's memory: host memory with a capacity, pools of freed blocks, statistics and a history.
//
// A freed block goes to a pool of the stream that it was allocated on and is given out again there at once, as CUDA's and
// Ascend's allocators do: whoever used it on another stream without `record_stream` finds other data in it. New memory is
// filled with a pattern (NaN in every floating type), so that reading what was never written shows.
#pragma once
#include "streams.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace simulated_npu {

constexpr size_t kRounding = 512;

struct Block {
  char* address = nullptr;
  size_t bytes = 0;      // rounded
  size_t requested = 0;  // 0: it is free
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
  std::vector<c10::StreamId> users;  // other streams that use it
};

struct Frame {  // of Python's stack
  std::string file, function;
  int line = 0;
};
using Frames = std::shared_ptr<const std::vector<Frame>>;

struct HistoryEntry {
  std::string action;  // as in PyTorch's snapshots
  size_t address = 0;
  size_t bytes = 0;
  c10::StreamId stream = 0;
  int64_t time_us = 0;
  Frames frames;  // where it was asked for
};

class NPUAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  void recordStream(const c10::DataPtr& data, c10::Stream user) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;  // free, all

  void set_capacity(size_t bytes) { capacity_ = bytes; }
  void set_fraction(double fraction, c10::DeviceIndex device) { fractions_[device] = fraction; }
  c10::DeviceIndex device_of(const void* data);
  void free(void* data);

  // `stack` tells who asks for memory. Null: no history is kept.
  using Stack = Frames (*)();
  void set_history(Stack stack, size_t most_entries);
  std::vector<HistoryEntry> history(c10::DeviceIndex device);
  std::vector<std::pair<Block, Frames>> blocks(c10::DeviceIndex device);  // with the stacks of live ones

 private:
  struct PerDevice {
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::map<c10::StreamId, std::multimap<size_t, Block*>> pools;
    std::vector<std::pair<Block*, std::vector<Mark>>> waiting;  // freed, and used by other streams
    std::vector<HistoryEntry> history;
    size_t oldest = 0;  // of the history, which is a ring
  };

  Block* take_free(PerDevice& device, c10::StreamId stream, size_t bytes);
  void return_finished(PerDevice& device);
  void put_into_pool(PerDevice& device, Block* block);
  void release_cached(c10::DeviceIndex index);
  void note(PerDevice& device, const char* action, const void* address, size_t bytes, c10::StreamId stream,
            Frames frames);
  [[noreturn]] void out_of_memory(c10::DeviceIndex index, size_t bytes, size_t limit);

  std::mutex mutex_;
  size_t capacity_ = size_t(64) << 30;
  std::array<double, kMostDevices> fractions_ = [] {
    std::array<double, kMostDevices> whole;
    whole.fill(1.0);
    return whole;
  }();
  std::array<PerDevice, kMostDevices> devices_;
  std::unordered_map<const void*, std::unique_ptr<Block>> blocks_;
  std::unordered_map<const void*, Frames> stacks_;
  Stack stack_ = nullptr;
  size_t most_entries_ = 0;
};

NPUAllocator& allocator();

}  // namespace simulated_npu
