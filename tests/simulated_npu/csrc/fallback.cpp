// Every operator as the CPU's kernel on the same bytes, at once or, in delayed mode, when somebody waits for its stream.
//
// To delay an operator, the shapes of its results must be known before it runs: its kernel for meta tensors tells. What
// has none, or gives the host something (a number, a shape that depends on values), or draws random numbers, waits for
// its stream and runs at once, as such operators do on hardware. Many kernels for meta tensors are Python and take
// milliseconds, so what they told is kept for the next call on the same shapes.
#include "fallback.h"

#include "cpu_views.h"
#include "hooks.h"
#include "random.h"
#include "streams.h"
#include "waits.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>

namespace simulated_npu {
namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

std::mutex counts_mutex;
bool counting = false;
std::map<std::string, int64_t> all_calls, undelayed_calls;

void count(std::map<std::string, int64_t>& calls, const c10::OperatorHandle& op) {
  if (!counting) return;
  std::lock_guard<std::mutex> lock(counts_mutex);
  calls[toString(op.operator_name())]++;
}

// Replaces each tensor in a value, lists included.
template <class Replace>
void replace_tensors(IValue& value, Replace replace) {
  if (value.isTensor()) {
    value = replace(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (Tensor tensor : value.toTensorList()) list.push_back(replace(tensor));
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional<Tensor>(replace(*tensor)) : std::nullopt);
    value = std::move(list);
  }
}

// What the schema of an operator tells, found once: it is written in strings.
struct Facts {
  bool has_generator = false;
  bool returns_view = false;
  bool returns_only_tensors = true;
  bool gives_host_a_value;  // a number, or a shape that depends on values

  explicit Facts(const c10::FunctionSchema& schema) {
    for (const auto& argument : schema.arguments())
      has_generator |= argument.type()->str().find("Generator") != std::string::npos;
    for (const auto& result : schema.returns()) {
      const auto type = result.type()->str();
      returns_view |= result.alias_info() && !result.alias_info()->isWrite();
      returns_only_tensors &= type == "Tensor" || type == "Tensor[]";
    }
    static const std::set<std::string> kShapes = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                                  "aten::unique_consecutive", "aten::repeat_interleave.Tensor"};
    const auto& name = schema.name();
    gives_host_a_value = kShapes.count(name) || kShapes.count(name + "." + schema.overload_name()) ||
                         (name != "aten::_fused_sdp_choice"  // follows from shapes and dtypes
                          && !schema.returns().empty() && !returns_view && !returns_only_tensors);
  }
};

const Facts& facts_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<c10::OperatorName, Facts> known;
  std::lock_guard<std::mutex> lock(mutex);
  return known.try_emplace(op.operator_name(), op.schema()).first->second;
}

struct Argument {
  Tensor given;
  bool written;
};

// One call of an operator, as the dispatcher gave it.
struct Call {
  const c10::OperatorHandle& op;
  const Facts& facts;
  Stack arguments;
  std::vector<Argument> tensors;
  std::optional<c10::Device> device;

  Call(const c10::OperatorHandle& called, Stack* stack) : op(called), facts(facts_of(called)) {
    const auto& schema = op.schema();
    arguments = torch::jit::last(stack, schema.arguments().size()).vec();
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* alias = schema.arguments()[i].alias_info();
      const bool written = alias && alias->isWrite();
      replace_tensors(arguments[i], [&](const Tensor& tensor) {
        if (tensor.defined()) tensors.push_back({tensor, written});
        return tensor;
      });
      if (arguments[i].isDevice() && arguments[i].toDevice().type() == kNPU) device = arguments[i].toDevice();
    }
    for (const auto& [tensor, written] : tensors)
      if (is_npu(tensor)) device = tensor.device();
    check_devices();
  }

  c10::DeviceIndex device_index() const { return device_or_current(device ? device->index() : -1); }

  // As hardware does: a CPU's tensor is taken where it is one number, and for the indices of `index`.
  void check_devices() const {
    if (!device) return;
    const auto& name = op.schema().name();
    const bool indexes = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
    for (const auto& [tensor, written] : tensors) {
      const bool taken = tensor.device() == *device || (tensor.is_cpu() && (indexes || (tensor.dim() == 0 && !written)));
      TORCH_CHECK(taken, toString(op.operator_name()), ": Expected all tensors to be on the same device, but found ",
                  tensor.device(), " and ", *device);
    }
  }
};

// ------------------------------------------------------------------------------------------------ at once

void adopt_changes(const Tensor& npu, const Tensor& cpu) {
  const auto& ours = npu.storage();
  const auto& theirs = cpu.storage();
  if (ours.data() != theirs.data() || ours.nbytes() != theirs.nbytes()) {  // the kernel made it larger
    resize_storage(ours, theirs.nbytes());
    wait_for_current_stream();
    if (theirs.nbytes()) std::memcpy(ours.mutable_data(), theirs.data(), theirs.nbytes());
  }
  if (npu.sizes() != cpu.sizes() || npu.strides() != cpu.strides() || npu.storage_offset() != cpu.storage_offset()) {
    npu.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
}

void run_now(const Call& call, Stack* stack) {
  CPUViews views;
  std::vector<std::pair<Tensor, Tensor>> written;
  auto cpu_stack = call.arguments;
  for (size_t i = 0; i < cpu_stack.size(); i++) {
    const auto& declared = call.op.schema().arguments()[i];
    auto& value = cpu_stack[i];
    const bool writes = declared.alias_info() && declared.alias_info()->isWrite();
    replace_tensors(value, [&](const Tensor& tensor) {
      auto cpu = views.view(tensor);
      if (writes) written.emplace_back(tensor, cpu);
      return cpu;
    });
    if (value.isDevice() && value.toDevice().type() == kNPU) value = c10::Device(c10::kCPU);
    if (value.isGenerator() && value.toGenerator().device().type() == kNPU) value = cpu_generator(value.toGenerator());
    if (call.facts.has_generator && value.isNone() && declared.type()->str().find("Generator") != std::string::npos)
      value = cpu_generator(default_generator(call.device_index()));
  }
  call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &cpu_stack);
  On on(call.device_index());
  for (auto& [npu, cpu] : written)
    if (is_npu(npu)) adopt_changes(npu, cpu);
  torch::jit::drop(*stack, call.arguments.size());
  for (auto& result : cpu_stack) {
    replace_tensors(result, [&](const Tensor& cpu) -> Tensor {
      for (auto& [npu, view] : written)
        if (view.is_same(cpu)) return npu;
      return views.to_npu(cpu);
    });
    stack->push_back(std::move(result));
  }
}

// ------------------------------------------------------------------------------------------------ delayed

Tensor meta_like(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

// All that a kernel for meta tensors sees of the arguments of a call, as bytes.
class Signature {
 public:
  explicit Signature(const Call& call) {
    bytes_ = toString(call.op.operator_name());
    add(at::typeMetaToScalarType(at::get_default_dtype()));
    for (const auto& value : call.arguments) add_value(value);
  }

  // Nothing where an argument is of a type that is not written down here.
  std::optional<std::string> bytes() const { return known_ ? std::optional<std::string>(bytes_) : std::nullopt; }

 private:
  template <class Plain>
  void add(const Plain& plain) {
    bytes_.append(reinterpret_cast<const char*>(&plain), sizeof(plain));
  }

  void add_sizes(c10::IntArrayRef sizes) {
    add(sizes.size());
    for (int64_t size : sizes) add(size);
  }

  void add_tensor(const Tensor& tensor) {
    add(tensor.defined());
    if (!tensor.defined()) return;
    add(tensor.device().type());
    add(tensor.scalar_type());
    add_sizes(tensor.sizes());
    add_sizes(tensor.strides());
    // An argument given twice is one meta tensor.
    auto first = std::find_if(tensors_.begin(), tensors_.end(), [&](const Tensor& other) { return other.is_same(tensor); });
    add(first - tensors_.begin());
    if (first == tensors_.end()) tensors_.push_back(tensor);
  }

  void add_value(const IValue& value) {
    if (value.isTensor()) {
      add('t'), add_tensor(value.toTensor());
    } else if (value.isInt()) {
      add('i'), add(value.toInt());
    } else if (value.isDouble()) {
      add('d'), add(value.toDouble());
    } else if (value.isBool()) {
      add('b'), add(value.toBool());
    } else if (value.isNone()) {
      add('n');
    } else if (value.isString()) {
      add('s'), add(value.toStringRef().size()), bytes_ += value.toStringRef();
    } else if (value.isDevice()) {
      add('v');  // becomes the meta device
    } else if (value.isList()) {
      add('l'), add(value.toListRef().size());
      for (const IValue& element : value.toListRef()) add_value(element);
    } else {
      known_ = false;
    }
  }

  std::string bytes_;
  std::vector<Tensor> tensors_;
  bool known_ = true;
};

// The results as meta tensors, or nothing where the operator cannot tell them, or would change an argument's shape.
std::optional<Stack> ask_meta(const Call& call) {
  if (!call.op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
  Stack stack = call.arguments;
  std::vector<std::pair<Tensor, Tensor>> pairs;
  for (auto& value : stack) {
    replace_tensors(value, [&](const Tensor& tensor) {
      if (!is_npu(tensor)) return tensor;
      for (auto& [given, meta] : pairs)
        if (given.is_same(tensor)) return meta;
      pairs.emplace_back(tensor, meta_like(tensor));
      return pairs.back().second;
    });
    if (value.isDevice()) value = c10::Device(c10::kMeta);
  }
  try {
    call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return std::nullopt;  // the operator itself will say what is wrong, if anything is
  }
  for (auto& [given, meta] : pairs)
    if (given.sizes() != meta.sizes()) return std::nullopt;
  return stack;
}

std::optional<Stack> results_on_meta(const Call& call) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::optional<Stack>> known;
  const auto signature = Signature(call).bytes();
  if (!signature) return ask_meta(call);
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = known.find(*signature);
    if (found != known.end()) return found->second;
  }
  auto results = ask_meta(call);  // may call Python, which may wait for another thread
  std::lock_guard<std::mutex> lock(mutex);
  return known.emplace(*signature, std::move(results)).first->second;
}

// Whether a call was given to its stream.
bool submit_call(const Call& call, Stack* stack) {
  if (!call.device || call.facts.has_generator || !call.facts.returns_only_tensors) return false;
  for (const auto& [tensor, written] : call.tensors)
    if (written && !is_npu(tensor)) return false;
  auto results = results_on_meta(call);
  if (!results) return false;

  On on(call.device_index());
  CPUViews views;
  Stack cpu_arguments = call.arguments;
  for (auto& value : cpu_arguments) {
    // A number on the CPU is read when the operator is launched.
    replace_tensors(value, [&](const Tensor& tensor) {
      return tensor.defined() && !is_npu(tensor) ? tensor.clone() : views.view(tensor);
    });
    if (value.isDevice()) value = c10::Device(c10::kCPU);
  }
  std::vector<Tensor> outputs;  // CPU views of the results, in order; undefined where nothing is copied
  const auto& returns = call.op.schema().returns();
  std::vector<IValue> npu_results;
  for (size_t i = 0; i < results->size(); i++) {
    if (returns[i].alias_info()) {
      // The argument itself, which has the same letter.
      for (size_t a = 0; a < call.arguments.size(); a++) {
        const auto* alias = call.op.schema().arguments()[a].alias_info();
        if (alias && *alias == *returns[i].alias_info()) npu_results.push_back(call.arguments[a]);
      }
      if (npu_results.size() != i + 1) return false;
      continue;
    }
    replace_tensors((*results)[i], [&](const Tensor& meta) {
      auto npu = meta.defined() ? at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(*call.device)) : meta;
      outputs.push_back(views.view(npu));
      return npu;
    });
    npu_results.push_back((*results)[i]);
  }
  submit(current_device(), current_stream(current_device()),
         [op = call.op, cpu_arguments = std::move(cpu_arguments), outputs = std::move(outputs)] {
           Stack cpu_stack = cpu_arguments;
           op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &cpu_stack);
           size_t next = 0;
           for (size_t i = 0; i < cpu_stack.size(); i++) {
             if (op.schema().returns()[i].alias_info()) continue;
             replace_tensors(cpu_stack[i], [&](const Tensor& result) {
               auto& output = outputs.at(next++);
               if (output.defined()) output.copy_(result);
               return result;
             });
           }
         });
  torch::jit::drop(*stack, call.arguments.size());
  for (auto& result : npu_results) stack->push_back(std::move(result));
  return true;
}

}  // namespace

void run_on_cpu_kernel(const c10::OperatorHandle& op, Stack* stack) {
  count(all_calls, op);
  Call call(op, stack);
  if (call.device && call.facts.gives_host_a_value) note_wait(op.schema().name());
  if (is_delayed() && !call.facts.returns_view) {
    if (submit_call(call, stack)) return;
    count(undelayed_calls, op);
    On on(call.device_index());
    wait_for_current_stream();
  }
  run_now(call, stack);
}

void count_operators(bool on) {
  std::lock_guard<std::mutex> lock(counts_mutex);
  counting = on;
  all_calls.clear();
  undelayed_calls.clear();
}
std::map<std::string, int64_t> operator_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return all_calls;
}
std::map<std::string, int64_t> undelayed_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return undelayed_calls;
}

}  // namespace simulated_npu
