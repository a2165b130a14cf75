// The backend `hccl`: collectives of NPU tensors by another backend (gloo) on the same bytes.
//
// Each group has a stream of its own, as under torch_npu: a collective waits for the stream that was current when it was
// called, and whoever waits for the collective makes its own stream wait, not the host.
#include "collectives.h"

#include "allocator.h"
#include "cpu_views.h"
#include "streams.h"

#include <ATen/ops/cat.h>

#include <functional>

namespace simulated_npu {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Launched final : c10d::Work {
  Launched(c10d::OpType type, Tensors results, Mark end, bool host_waits)
      : Work(-1, type), results_(std::move(results)), end_(end), host_waits_(host_waits) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(kNPU, end.device)});
    On on(end.device, end.stream);  // who waits for the future waits for this stream
    future_->markCompleted(c10::IValue(results_));
  }
  bool isCompleted() override {
    advance(end_);  // who asks again and again must see it happen at last
    return is_done(end_);
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    if (host_waits_) wait_for(end_);
    submit_wait(end_.device, current_stream(end_.device), end_);
    return true;
  }
  void synchronize() override { wait(c10d::kUnsetTimeout); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors results_;
  Mark end_;
  bool host_waits_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// HCCL reduces no float64.
void check_reducible(const Tensors& tensors) {
  for (const auto& tensor : tensors)
    TORCH_CHECK(tensor.scalar_type() != at::kDouble && !tensor.is_complex(), "HCCL cannot reduce ", tensor.scalar_type());
}

struct HCCL final : c10d::Backend {
  explicit HCCL(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "hccl"; }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return inner_->getBackendOptions(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch(c10d::OpType::BROADCAST, tensors, tensors,
                  [options](c10d::Backend& gloo, Tensors& x, Tensors&) { return gloo.broadcast(x, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check_reducible(tensors);
    return launch(c10d::OpType::ALLREDUCE, tensors, tensors, [this, options](c10d::Backend& gloo, Tensors& x, Tensors&) {
      auto summed = options;
      return averaged(gloo.allreduce(x, sum_for_average(summed)), options.reduceOp, x);
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (size_t i = 0; i + 1 < tensors.size(); i++) {
      Tensors one{tensors[i]};
      allreduce(one, options);
    }
    Tensors last{tensors.back()};
    return allreduce(last, options);  // the same stream: the last is done when all are
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_reducible(tensors);
    return launch(c10d::OpType::REDUCE, tensors, tensors, [this, options](c10d::Backend& gloo, Tensors& x, Tensors&) {
      auto summed = options;
      return averaged(gloo.reduce(x, sum_for_average(summed)), options.reduceOp, x);
    });
  }
  WorkPtr allgather(TensorLists& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    return launch(c10d::OpType::ALLGATHER, from, to[0], [options](c10d::Backend& gloo, Tensors& x, Tensors& y) {
      TensorLists lists{y};
      return gloo.allgather(lists, x, options);
    });
  }
  WorkPtr _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& options) override {
    return launch(c10d::OpType::_ALLGATHER_BASE, {from}, {to},
                  [options](c10d::Backend& gloo, Tensors& x, Tensors& y) { return gloo._allgather_base(y[0], x[0], options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < to.size(); i++) last = _allgather_base(to[i], from[i], options);
    return last;
  }
  WorkPtr gather(TensorLists& to, Tensors& from, const c10d::GatherOptions& options) override {
    return launch(c10d::OpType::GATHER, from, to.empty() ? Tensors{} : to[0], [options](c10d::Backend& gloo, Tensors& x, Tensors& y) {
      auto lists = y.empty() ? TensorLists{} : TensorLists{y};
      return gloo.gather(lists, x, options);
    });
  }
  WorkPtr scatter(Tensors& to, TensorLists& from, const c10d::ScatterOptions& options) override {
    return launch(c10d::OpType::SCATTER, from.empty() ? Tensors{} : from[0], to, [options](c10d::Backend& gloo, Tensors& x, Tensors& y) {
      auto lists = x.empty() ? TensorLists{} : TensorLists{x};
      return gloo.scatter(y, lists, options);
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& options) override {
    check_reducible({from});
    return launch(c10d::OpType::_REDUCE_SCATTER_BASE, {from}, {to}, [this, options](c10d::Backend& gloo, Tensors& x, Tensors& y) {
      auto summed = options;
      return averaged(gloo._reduce_scatter_base(y[0], x[0], sum_for_average(summed)), options.reduceOp, y);
    });
  }
  WorkPtr reduce_scatter(Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& options) override {
    auto joined = at::cat(from[0]);
    return _reduce_scatter_base(to[0], joined, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < to.size(); i++) last = _reduce_scatter_base(to[i], from[i], options);
    return last;
  }
  WorkPtr alltoall_base(Tensor& to, Tensor& from, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
                        const c10d::AllToAllOptions& options) override {
    return launch(c10d::OpType::ALLTOALL_BASE, {from}, {to}, [=](c10d::Backend& gloo, Tensors& x, Tensors& y) {
      auto to_splits = to_sizes, from_splits = from_sizes;
      return gloo.alltoall_base(y[0], x[0], to_splits, from_splits, options);
    });
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    return launch(c10d::OpType::SEND, tensors, {}, [=](c10d::Backend& gloo, Tensors& x, Tensors&) { return gloo.send(x, rank, tag); });
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    return launch(c10d::OpType::RECV, {}, tensors, [=](c10d::Backend& gloo, Tensors&, Tensors& y) { return gloo.recv(y, rank, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto plain = options;
    plain.device_ids.clear();
    plain.device = std::nullopt;
    const auto meet = [plain](c10d::Backend& gloo, Tensors&, Tensors&) { return gloo.barrier(plain); };
    return launch(c10d::OpType::BARRIER, {}, {}, meet, /*host_waits=*/true);
  }

 private:
  // Gloo has no average: a sum, divided where it ends.
  template <class Options>
  static const Options& sum_for_average(Options& options) {
    if (options.reduceOp == c10d::ReduceOp::AVG) options.reduceOp = c10d::ReduceOp::SUM;
    return options;
  }
  WorkPtr averaged(WorkPtr work, const c10d::ReduceOp& asked, Tensors& results) const {
    if (asked != c10d::ReduceOp::AVG) return work;
    work->wait();
    for (auto& result : results) result.div_(getSize());
    return nullptr;
  }

  static Tensors views(CPUViews& views, const Tensors& tensors) {
    Tensors cpu;
    for (const auto& tensor : tensors) {
      TORCH_CHECK(is_npu(tensor), "hccl takes npu tensors, and was given one on ", tensor.device());
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "hccl takes tensors without gaps");
      cpu.push_back(views.view(tensor));
    }
    return cpu;
  }

  // What the other backend does with views of what is read and of what is written.
  using Collective = std::function<WorkPtr(c10d::Backend&, Tensors&, Tensors&)>;

  WorkPtr launch(c10d::OpType type, const Tensors& from, const Tensors& to, Collective collective, bool host_waits = false) {
    const auto device = from.empty() ? (to.empty() ? current_device() : to[0].device().index()) : from[0].device().index();
    CPUViews both;
    auto inputs = views(both, from), outputs = views(both, to);
    submit_wait(device, stream_, mark(device, current_stream(device)));
    // Whoever frees them before the collective has run must not have them given out again.
    for (const auto* tensors : {&from, &to})
      for (const auto& tensor : *tensors)
        allocator().recordStream(tensor.storage().data_ptr(),
                                 c10::Stream(c10::Stream::UNSAFE, c10::Device(kNPU, device), stream_));
    submit_collective(device, stream_, [inner = inner_, inputs, outputs, collective]() mutable {
      auto work = collective(*inner, inputs, outputs);
      if (work) work->wait();
    });
    return c10::make_intrusive<Launched>(type, to, mark(device, stream_), host_waits);
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  c10::StreamId stream_ = new_stream();
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_hccl(c10::intrusive_ptr<c10d::Backend> inner) {
  return c10::make_intrusive<HCCL>(std::move(inner));
}

}  // namespace simulated_npu
