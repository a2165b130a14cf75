"""Environment variables of a device's libraries, to be set before a rank starts, unless the user
has set them.

``kinds`` has the variables with their reasons; docs/ascend.md also lists the defaults kept for
NPUs.
"""

from collections.abc import Mapping

from fsdptoys.errors import ConfigError

from .kinds import ALLOC_CONF, KINDS


def check_allocator_settings(device_type: str, present: Mapping[str, str]) -> None:
    """Raise a ConfigError for both settings of the allocator, with which torch_npu fails."""
    kind = KINDS[device_type]
    if kind.takes_one_allocator_variable and all(
        name in present for name in kind.allocator_variables
    ):
        raise ConfigError(
            f"{ALLOC_CONF} and {kind.allocator_variables[0]} are both set, of which "
            f"{kind.package} takes one alone; unset {ALLOC_CONF}"
        )


def allocator_environment(
    device_type: str, present: Mapping[str, str]
) -> dict[str, str]:
    """Return the allocator's settings; empty if ``present`` has any of its own.

    They must be set before the device is initialized, as by a query of its name: the allocator
    reads them once, when it is created.
    """
    names = KINDS[device_type].allocator_variables
    if not names or any(name in present for name in names):
        return {}
    # Expandable segments avoid fragmentation by a sharded model's varying sizes.
    return {names[0]: "expandable_segments:True"}


def device_environment(
    device_type: str,
    deterministic: bool,
    timeout_seconds: float,
    present: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment variables for a type of device; ``present`` is searched for settings
    of the allocator."""
    kind = KINDS[device_type]
    environment = allocator_environment(device_type, present)
    if deterministic:
        environment |= kind.deterministic_variables
    return environment | kind.collective_variables(timeout_seconds)
