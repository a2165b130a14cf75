"""The planner's choice for ``fsdptoys train`` without overrides."""

from fsdptoys.config.compose import compose, compose_presets
from fsdptoys.config.overrides import list_choices
from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.device.profile import load_hardware
from fsdptoys.launch.hardware import profile_of_this_machine


def choose_largest(experiment: str, device_type: str, world_size: int) -> list[str]:
    """Return the overrides of the largest preset predicted to fit, on an accelerator with a known profile.

    Args:
        experiment: the override returned alone on other devices.
        device_type: the run's device type.
        world_size: number of ranks.
    """
    profile = profile_of_this_machine()
    if profile is None or device_type == "cpu":
        return [experiment]
    # Importing the planner takes a while, and a run on a CPU or with overrides does not need it.
    from fsdptoys.plan.estimate.estimate import closed_form
    from fsdptoys.plan.search.search import largest_preset

    hardware = load_hardware(profile)
    presets = [preset for preset in compose_presets(list_choices()["model"]) if not preset.name.endswith("_debug")]
    _, best = largest_preset(
        presets,
        lambda words: compose(words).config,
        [experiment],
        hardware,
        world_size,
        hardware.usable_bytes,
        AllocatorKind.expandable,
        closed_form,
    )
    return list(best.words)
