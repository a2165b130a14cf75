"""All of torch_npu that this project uses: names, arguments, operators, environment variables, error texts.

``test_interface.py`` compares it with the wheels and with our sources.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """The largest argument list of our calls of a name."""

    positional: int = 0
    keywords: tuple[str, ...] = ()


NPU = "torch_npu.npu"
PROFILER = "torch_npu.profiler"

NAMES: dict[str, Call | None] = {
    f"{NPU}.Event": Call(),
    f"{NPU}.Event.record": Call(1),
    f"{NPU}.Event.synchronize": Call(),
    f"{NPU}.Stream": Call(keywords=("device",)),
    f"{NPU}.Stream.record_event": Call(),
    f"{NPU}.Stream.synchronize": Call(),
    f"{NPU}.Stream.wait_event": Call(1),
    f"{NPU}.Stream.wait_stream": Call(1),
    f"{NPU}.current_device": Call(),
    f"{NPU}.current_stream": Call(1),
    f"{NPU}.get_device_name": Call(1),
    f"{NPU}.get_device_properties": Call(1),
    f"{NPU}.get_rng_state": Call(),
    f"{NPU}.is_bf16_supported": Call(),
    f"{NPU}.max_memory_allocated": Call(),
    f"{NPU}.memory._record_memory_history": Call(keywords=("enabled", "context", "stacks", "max_entries")),
    f"{NPU}.memory._snapshot": Call(),
    f"{NPU}.memory_allocated": Call(),
    f"{NPU}.memory_reserved": Call(),
    f"{NPU}.reset_peak_memory_stats": Call(),
    f"{NPU}.set_rng_state": Call(1),
    f"{NPU}.stream": Call(1),
    f"{PROFILER}.ExportType.Text": None,
    f"{PROFILER}.ProfilerActivity.CPU": None,
    f"{PROFILER}.ProfilerActivity.NPU": None,
    f"{PROFILER}.ProfilerLevel": None,
    f"{PROFILER}.ProfilerLevel.Level0": None,  # these three for the values of profile.npu_level
    f"{PROFILER}.ProfilerLevel.Level1": None,
    f"{PROFILER}.ProfilerLevel.Level2": None,
    f"{PROFILER}._ExperimentalConfig": Call(keywords=("profiler_level", "export_type")),
    f"{PROFILER}.profile": Call(
        keywords=(
            *("activities", "schedule", "on_trace_ready", "experimental_config"),
            *("record_shapes", "profile_memory", "with_stack"),
        )
    ),
    f"{PROFILER}.schedule": Call(keywords=("skip_first", "wait", "warmup", "active", "repeat")),
    f"{PROFILER}.tensorboard_trace_handler": Call(keywords=("dir_name", "worker_name", "analyse_flag")),
}
"""None for uncalled names."""

NOT_READ = {
    *(f"{NPU}.Event.{method}" for method in ("record", "synchronize")),
    *(f"{NPU}.Stream.{method}" for method in ("record_event", "synchronize", "wait_event", "wait_stream")),
    *(f"{PROFILER}.ProfilerLevel.Level{level}" for level in range(3)),
}
"""Names that no source spells out."""

HANDED = {("fsdptoys/profiler/memory_snapshot.py", "_memory"): f"{NPU}.memory"}
"""(source, attribute) → the object passed in from another source."""

OPERATORS = {
    "npu_fusion_attention": Call(5, ("atten_mask", "scale", "sparse_mode")),
    "npu_grouped_matmul": Call(2, ("group_list", "split_item", "group_type", "group_list_type")),
    "npu_rms_norm": Call(3),
    "npu_rotary_mul": Call(4),
    "npu_swiglu": Call(2),
}

NAMED_ONLY = {"npu_fusion_attention_v2", "npu_fusion_attention_v3"}
"""Operators that a run meets if other code calls them; the latter exists since a version after 2.7.1."""

NOT_TORCH_NPU = {"npu_level", "npu_kernels", "npu_fusion_attention_backward", "npu_swiglu_backward"}
"""Texts in our sources that look like operators: a key, a module, and the planner's stand-ins."""

VARIABLES = {
    "ASCEND_LAUNCH_BLOCKING",
    "HCCL_CONNECT_TIMEOUT",
    "HCCL_EXEC_TIMEOUT",
    "MULTI_STREAM_MEMORY_REUSE",
    "PYTORCH_NPU_ALLOC_CONF",
    "TASK_QUEUE_ENABLE",
    "TORCH_HCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_HCCL_DUMP_ON_TIMEOUT",
    "TORCH_HCCL_ENABLE_MONITORING",
    "TORCH_HCCL_TRACE_BUFFER_SIZE",
}
"""Environment variables read by torch_npu."""

CANN_VARIABLES = {"ASCEND_RT_VISIBLE_DEVICES", "HCCL_BUFFSIZE", "HCCL_DETERMINISTIC"}
"""Environment variables read by CANN, which is not installed here."""

NOT_VARIABLES = {"ASCEND_PROFILER_OUTPUT"}
"""Texts in our sources that look like variables: a folder of a trace, named in torch_npu's Python."""

TEXTS = ("NPU out of memory", " total capacity", "already allocated", "reserved in total", "op_statistic", "_ascend_pt")
"""Texts of errors and files that our code looks for."""
