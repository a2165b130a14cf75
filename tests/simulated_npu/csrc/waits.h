// Calls for which the host of an accelerator waits: reads, blocking copies, and synchronizations.
#pragma once
#include "allocator.h"

#include <string>
#include <vector>

namespace simulated_npu {

struct Wait {
  std::string call;
  Frames frames;
};

void note_wait(const std::string& call);
void record_waits(Frames (*stack)());  // nullptr: stop
std::vector<Wait> take_waits();        // since the last call

}  // namespace simulated_npu
