"""How each number of a summary is measured, in sentences for ``summary.md`` and reports."""

from collections.abc import Sequence

from .results import RunResults

ROUTING_DEFINITIONS = (
    (
        "Load-balancing loss: E · Σ f·P over the E experts of a layer, where f is the fraction of "
        "tokens routed to an expert and P the mean of its probability; mean over the "
        "layers, without its coefficient. Perfect balance gives K, the number of experts per token "
        "(`model.top_k`)."
    ),
    (
        "Router z-loss: mean of logsumexp(router logits)² over tokens and layers, without its "
        "coefficient."
    ),
    (
        "Router entropy: entropy of the experts' shares of the tokens, divided by that of equal "
        "shares; mean over the layers. 1 is perfect balance; 0 means that one expert gets all "
        "tokens."
    ),
    "Busiest expert: its tokens divided by the mean of its layer; maximum over the layers.",
    "Idlest expert: its tokens divided by the mean of its layer; minimum over the layers.",
    "Routing numbers count all ranks, micro-batches and positions of the step, including padding.",
)
"""For models with experts."""

SKIPPED_DEFINITION = (
    "Skipped steps: steps without an optimizer step, because the loss or the gradient was not "
    "finite (`train.skip_nonfinite`). Medians and the mean of the last losses exclude them."
)

LOSS_SCALE_DEFINITION = (
    "Loss scale: factor on the loss in the backward of float16, chosen as by "
    "`torch.amp.GradScaler` (`loss_scale.*`). Losses, gradient norms and clipping are those of "
    "the unscaled loss. Overflows are skipped steps that lower it."
)

SPIKES_DEFINITION = (
    "Loss spike: a loss more than `metrics.spike_threshold` robust standard deviations (1.4826 "
    "times the median absolute deviation, at least 0.01 nats) above the median of up to 64 "
    "previous losses."
)

PREDICTION_DEFINITION = (
    "Predicted: computed before the first step from the settings and a hardware profile "
    "(`plan.hardware`); `prediction.json` has the details. The difference is relative to the "
    "measurement. `fsdptoys plan calibrate` with this run's directory calibrates a profile for "
    "this machine."
)

COMPILATION_DEFINITION = (
    "Compiler: number of compilations by `torch.compile`, and their duration for forwards and "
    "backwards, which is part of the time of their steps. At a graph break, compilation ends "
    "within a function, and a new graph begins after it."
)


LAYOUT_DEFINITION = (
    "Bytes per rank: the largest over the ranks, read from the tensors before the first step: "
    "parameters with the padding of uneven shards; gradients once all are reduced, none with "
    "`memory.optimizer_in_backward`; optimizer states without step counters. Units are gathered "
    "in the dtype of forward and backward."
)


def definitions(
    runs: Sequence[RunResults],
    *,
    predicted: bool,
    compiled: bool = False,
    laid_out: bool = False,
) -> tuple[str, ...]:
    """The definition of each number in the summaries of runs, for predictions, compilation and
    layouts as given."""
    warmups = " or ".join(map(str, sorted({run.warmup_steps for run in runs}))) or 0
    return (
        (
            "Loss: mean over the valid tokens of the global batch, before the optimizer step, of "
            "the training objective: cross entropy in nats, with label smoothing and z-loss if "
            "enabled."
        ),
        (
            "Held-out loss: mean cross entropy over tokens excluded from training, after the "
            "optimizer step."
        ),
        (
            "References: entropies of simple models of the same data; a loss below one is better "
            "than that model."
        ),
        (
            "Step time: wall time of a step on rank 0, without evaluation. Deferred optimizer "
            "updates (`memory.offload_schedule=lazy`, `memory.cpu_offload_executor=overlapped`) "
            "count in the step whose forward waits for them; before an evaluation, in their own "
            "step."
        ),
        (
            f"Medians (with 10th and 90th percentile) exclude the first {warmups} steps of each "
            "start, which include allocation, kernel selection and compilation."
        ),
        (
            "Waiting for data: time that rank 0 waited for its batches, as a fraction of the step "
            "time, over the same steps. Waits of other ranks show up as time in collectives "
            "instead."
        ),
        (
            "tokens/s: valid tokens of all ranks divided by the step time; with `data=chat`, where "
            "only answers are valid, all tokens but padding."
        ),
        (
            "TFLOP/s: model FLOPs of these tokens, without recomputation, divided by the step time "
            "and the number of ranks."
        ),
        (
            "MFU: TFLOP/s divided by the bfloat16 peak of the device, also with `train.float8`; "
            "omitted if the peak is unknown."
        ),
        (
            "Device memory: bytes allocated in tensors, and their peak, by the device's allocator. "
            "On a CPU they are counted in some steps, in which rank 0 records every block that "
            "tensors allocate (`memory_counted_step` in `metrics.jsonl`); gradients are those that "
            "the optimizer receives, and tensors that offloading keeps in the host's place are "
            "apart. Resident set: memory of the process in RAM, Python included, read after each "
            "step; its peak since the start of the process is recorded by the kernel (VmHWM)."
        ),
        *([SKIPPED_DEFINITION] if any(run.skipped_steps for run in runs) else ()),
        *(
            [LOSS_SCALE_DEFINITION]
            if any(run.loss_scale is not None for run in runs)
            else ()
        ),
        *([SPIKES_DEFINITION] if any(run.spikes for run in runs) else ()),
        *([PREDICTION_DEFINITION] if predicted else ()),
        *([COMPILATION_DEFINITION] if compiled else ()),
        *([LAYOUT_DEFINITION] if laid_out else ()),
        *(ROUTING_DEFINITIONS if any(run.routing is not None for run in runs) else ()),
    )
