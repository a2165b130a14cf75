"""Messages for invalid settings, and for those without effect."""

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.profiler import NPULevel, ProfileConfig


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"enabled": True, "skip_steps": -1}, "profile.skip_steps=-1 must be at least 0; set profile.skip_steps=0"),
        ({"enabled": True, "active_steps": 0}, "profile.active_steps=0 must be at least 1; set profile.active_steps=1"),
        (
            {"enabled": True, "ranks": [1, 1]},
            "profile.ranks=[1,1] must name at least one rank, each once and from 0; set profile.ranks=[0]",
        ),
        ({"stacks": True}, "profile.stacks=true does nothing as set; set profile.enabled=true or leave it out"),
        (
            {"snapshot": True, "npu_level": NPULevel.level2},
            "profile.npu_level=level2 does nothing as set; set profile.enabled=true or leave it out",
        ),
        (
            {"enabled": True, "snapshot_steps": 2},
            "profile.snapshot_steps=2 does nothing as set; set profile.snapshot=true or leave it out",
        ),
        (
            {"ranks": [1]},
            "profile.ranks=[1] does nothing as set; set profile.enabled=true or profile.snapshot=true or leave it out",
        ),
    ],
)
def test_invalid_and_ineffective_values_are_refused(values, sentence):
    """Oracle: the expected message."""
    with pytest.raises(ConfigError) as error:
        ProfileConfig(**values)
    assert str(error.value) == sentence


ON_CPU = (
    "profile.snapshot=true records the allocator of an accelerator, and this run is on a CPU; set "
    "profile.snapshot=false, or profile.enabled=true profile.memory=true for a trace with allocations"
)
NO_LEVEL = "profile.npu_level=level0 does nothing on cuda; leave it out, which keeps profile.npu_level=level1"
LATE_WINDOW = (
    "profile.skip_steps=5, warmup_steps=1 and active_steps=3 need 9 steps, and train.steps=8; set profile.skip_steps=4 "
    "profile.warmup_steps=1 profile.active_steps=3"
)
LONG_WINDOW = (
    "profile.skip_steps=3, warmup_steps=1 and active_steps=9 need 13 steps, and train.steps=8; set "
    "profile.skip_steps=0 profile.warmup_steps=0 profile.active_steps=8"
)
LATE_SNAPSHOT = (
    "profile.snapshot_first_step=7 and snapshot_steps=3 end at step 9, and train.steps=8; set "
    "profile.snapshot_first_step=1 profile.snapshot_steps=3"
)
NO_RANK = "profile.ranks=[0,4] names rank 4, and the last of 4 is 3; set profile.ranks=[0]"


@pytest.mark.parametrize(
    ("values", "device_type", "sentence"),
    [
        ({"enabled": True, "ranks": [0, 4]}, "cpu", NO_RANK),
        ({"snapshot": True}, "cpu", ON_CPU),
        ({"enabled": True, "npu_level": NPULevel.level0}, "cuda", NO_LEVEL),
        ({"enabled": True, "skip_steps": 5}, "cuda", LATE_WINDOW),
        ({"enabled": True, "active_steps": 9}, "cuda", LONG_WINDOW),
        ({"snapshot": True, "snapshot_first_step": 7}, "npu", LATE_SNAPSHOT),
    ],
)
def test_values_unsupported_by_the_run_are_refused(values, device_type, sentence):
    """Oracle: the expected message, for a run of 8 steps on 4 ranks."""
    with pytest.raises(ConfigError) as error:
        ProfileConfig(**values).validate(world_size=4, device_type=device_type, steps=8)
    assert str(error.value) == sentence


def test_disabled_profiler_is_always_valid():
    """Oracle: no error for a run of one step on one rank, which is too short for any window."""
    for device_type in ("cuda", "npu", "cpu"):
        ProfileConfig().validate(world_size=1, device_type=device_type, steps=1)
