// What Python calls.
#include "allocator.h"
#include "collectives.h"
#include "fallback.h"
#include "hooks.h"
#include "pinned.h"
#include "random.h"
#include "streams.h"
#include "waits.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <memory>

namespace {

using namespace simulated_npu;
namespace py = pybind11;

// Operators with a kernel for CPUs and a composite one would be composed on this device, and give other bits.
void register_cpu_kernels(const std::vector<std::string>& names) {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : names) library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu_kernel>());
}

constexpr int kMostFrames = 64;

Frames python_stack() {
  if (!Py_IsInitialized()) return nullptr;
  py::gil_scoped_acquire gil;
  auto frames = std::make_shared<std::vector<Frame>>();
  auto frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  for (int depth = 0; frame && depth < kMostFrames; depth++) {
    auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    frames->push_back({code.attr("co_filename").cast<std::string>(), code.attr("co_name").cast<std::string>(),
                       PyFrame_GetLineNumber(raw)});
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return frames;
}

py::list to_python(const Frames& frames) {
  py::list list;
  if (frames)
    for (const auto& frame : *frames) {
      py::dict one;
      one["filename"] = frame.file;
      one["name"] = frame.function;
      one["line"] = frame.line;
      list.append(one);
    }
  return list;
}

py::list history(int device) {
  py::list list;
  for (const auto& entry : allocator().history(device)) {
    py::dict one;
    one["action"] = entry.action;
    one[entry.action == "oom" ? "device_free" : "addr"] = entry.address;
    one["size"] = entry.bytes;
    one["stream"] = entry.stream;
    one["time_us"] = entry.time_us;
    one["frames"] = to_python(entry.frames);
    list.append(one);
  }
  return list;
}

py::list noted_waits() {
  py::list list;
  for (const auto& [call, frames] : take_waits()) {
    py::dict one;
    one["call"] = call;
    one["frames"] = to_python(frames);
    list.append(one);
  }
  return list;
}

py::list blocks(int device) {
  py::list list;
  for (const auto& [block, frames] : allocator().blocks(device)) {
    py::dict one;
    one["address"] = reinterpret_cast<size_t>(block.address);
    one["bytes"] = block.bytes;
    one["requested"] = block.requested;
    one["stream"] = block.stream;
    one["frames"] = to_python(frames);
    list.append(one);
  }
  return list;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("setup", [](int devices, size_t capacity_bytes) {
    set_device_count(devices);
    allocator().set_capacity(capacity_bytes);
    register_hooks();
  });
  m.def("register_cpu_kernels", &register_cpu_kernels);
  m.def("set_capacity", [](size_t bytes) { allocator().set_capacity(bytes); });
  m.def("set_fraction", [](double fraction, int device) { allocator().set_fraction(fraction, device); });
  m.def("set_delayed", &set_delayed, py::call_guard<py::gil_scoped_release>());
  m.def("is_delayed", &is_delayed);
  m.def("set_waits", &set_waits);
  m.def("device_count", &device_count);
  m.def("current_device", [] { return int(current_device()); });
  m.def("set_device", [](int device) { set_current_device(device); });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("pinned_bytes", &pinned_bytes);
  m.def("is_pinned", [](const at::Tensor& tensor) { return is_pinned(tensor.const_data_ptr()); });
  m.def("make_hccl", &make_hccl);
  m.def("record_history", [](bool on, size_t most_entries) { allocator().set_history(on ? &python_stack : nullptr, most_entries); });
  m.def("history", &history);
  m.def("blocks", &blocks);
  m.def("record_waits", [](bool on) { record_waits(on ? &python_stack : nullptr); });
  m.def("take_waits", &noted_waits);
  m.def("count_operators", &count_operators);
  m.def("operator_counts", &operator_counts);
  m.def("undelayed_counts", &undelayed_counts);
}
