"""Definitions of the numbers in ``summary.md``."""

ROUTING_DEFINITIONS = (
    "- Load-balancing loss: E · Σ f·P over the E experts of a layer, with f the tokens sent to an expert over all "
    "tokens and P the mean of its probability; a mean over the layers, without its coefficient. Perfect balance gives "
    "K, the number of experts that a token is sent to (`model.top_k`).",
    "- Router z-loss: mean of logsumexp(router logits)² over tokens and layers, without its coefficient.",
    "- Router entropy: of the experts' shares of the tokens, over that of equal shares; a mean over the layers. 1 is "
    "balance, 0 would be one expert for all tokens.",
    "- Busiest expert: its tokens over the mean of its layer, the largest of any layer.",
    "- Idlest expert: its tokens over the mean of its layer, the smallest of any layer.",
    "- Numbers of the routing count all ranks, micro-batches and positions of the step, padding included.",
)
"""For models with experts."""

SKIPPED_DEFINITION = (
    "- Steps without update: those whose loss or gradient was not finite (`train.skip_nonfinite`). Medians and the "
    "mean of the last losses leave them out."
)

SPIKES_DEFINITION = (
    "- Loss spike: a loss more than `metrics.spike_threshold` robust standard deviations (1.4826 times the median "
    "absolute deviation, 0.01 nats at least) over the median of up to 64 losses before it."
)


PREDICTION_DEFINITION = (
    "- Predicted: made before the first step from the settings and a profile of the hardware alone "
    "(`plan.hardware`), as `prediction.json` tells; the difference is a share of what was measured. "
    "`fsdptoys plan calibrate` with this run's directory makes a profile of this machine."
)


COMPILATION_DEFINITION = (
    "- Compiler: functions that `torch.compile` compiled, each time that it did, and the seconds that it took for "
    "forwards and backwards, which are part of the steps that they fell in. Graph breaks are places where it had to "
    "leave a function and to begin anew behind."
)


def definitions(
    warmup_steps: int,
    with_experts: bool,
    with_skipped: bool = False,
    with_spikes: bool = False,
    with_prediction: bool = False,
    with_compilation: bool = False,
) -> str:
    """One line on the definition of each number in the summary."""
    return "\n".join(
        [
            "- Loss: mean over the valid tokens of the global batch, before the step's update, of what is minimised: "
            "cross entropy in nats, with label smoothing and z-loss where these are on.",
            "- Held-out loss: mean cross entropy over tokens that are not trained on, after the update.",
            "- References: entropies of simple models of the same data; a loss below one has learned more than it.",
            "- Step time: wall time of a step on rank 0; evaluation, where there is one, is not part of it. "
            "Updates that are deferred (`memory.offload_schedule=lazy`, `memory.cpu_offload_executor=overlapped`) "
            "count in the step whose forward waits for them, or before an evaluation in their own.",
            f"- Medians (with 10th and 90th percentile) leave out the first {warmup_steps} steps of each start, which "
            "pay for allocation, kernel choice and compilation.",
            "- Waiting for data: the sum, over the same steps, of the time until rank 0 had its batches, over that of "
            "their step times. What other ranks wait for shows there as time in a collective, and not here.",
            "- tokens/s: valid tokens of all ranks over the step time.",
            "- TFLOP/s: the model's FLOPs for those tokens, without recomputation, over the step time and the ranks.",
            "- MFU: that over the peak of the device in bfloat16, with `train.float8` too; left out where the peak is "
            "not known.",
            "- Peak device memory: the allocator's highest sum of tensors. Resident set: memory of the process in RAM, "
            "read after each step; its peak is the kernel's own record (VmHWM), from the process's start on.",
            *([SKIPPED_DEFINITION] if with_skipped else ()),
            *([SPIKES_DEFINITION] if with_spikes else ()),
            *([PREDICTION_DEFINITION] if with_prediction else ()),
            *([COMPILATION_DEFINITION] if with_compilation else ()),
            *(ROUTING_DEFINITIONS if with_experts else ()),
        ]
    )
