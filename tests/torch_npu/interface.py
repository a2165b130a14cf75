"""What this project uses of torch_npu beyond the names that ``uses.py`` finds in its sources."""

from tests.torch_npu.uses import Use

NPU = "torch_npu.npu"
PROFILER = "torch_npu.profiler"

UNREAD = {
    f"{NPU}.Event.elapsed_time": Use(1),
    f"{NPU}.Event.record": Use(1),
    f"{NPU}.Event.synchronize": Use(),
    f"{NPU}.Stream.record_event": Use(),
    f"{NPU}.Stream.synchronize": Use(),
    f"{NPU}.Stream.wait_event": Use(1),
    f"{NPU}.Stream.wait_stream": Use(1),
    f"{PROFILER}.profile": Use(keywords={"record_shapes", "profile_memory", "with_stack"}),
    f"{PROFILER}.schedule": Use(keywords={"skip_first", "wait", "warmup", "active", "repeat"}),
}
"""Calls that no source spells out: methods of objects that are passed on, and arguments in a dict."""

LEVELS = [f"{PROFILER}.ProfilerLevel.Level{level}" for level in range(3)]
"""For the values of profile.npu_level."""

HANDED = {("fsdptoys/profiler/memory_snapshot.py", "_memory"): f"{NPU}.memory"}
"""(source, attribute) → the object passed in from another source."""

NAMED_ONLY = {"npu_fusion_attention_v2", "npu_fusion_attention_v3"}
"""Operators that a run meets if other code calls them; the latter exists since a version after 2.7.1."""

NOT_TORCH_NPU = {"npu_level", "npu_kernels", "npu_fusion_attention_backward", "npu_swiglu_backward"}
"""Texts in our sources that look like operators: a key, a module, and the planner's stand-ins."""

CANN_VARIABLES = {"ASCEND_RT_VISIBLE_DEVICES", "HCCL_BUFFSIZE", "HCCL_DETERMINISTIC"}
"""Environment variables read by CANN, which is not installed here."""

TEXTS = ("NPU out of memory", " total capacity", "already allocated", "reserved in total", "op_statistic", "_ascend_pt")
"""Texts of errors and files that our code looks for."""
