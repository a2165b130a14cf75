#include "waits.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace simulated_npu {
namespace {

std::atomic<Frames (*)()> waits_stack{nullptr};
std::mutex waits_mutex;
std::vector<Wait> noted;

}  // namespace

void note_wait(const std::string& call) {
  auto stack = waits_stack.load();
  if (!stack) return;
  Wait wait{call, stack()};  // before the lock: it takes Python's own
  std::lock_guard<std::mutex> lock(waits_mutex);
  noted.push_back(std::move(wait));
}

void record_waits(Frames (*stack)()) { waits_stack = stack; }

std::vector<Wait> take_waits() {
  std::lock_guard<std::mutex> lock(waits_mutex);
  return std::exchange(noted, {});
}

}  // namespace simulated_npu
