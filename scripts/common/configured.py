"""Configurations of a script's runs."""

from collections.abc import Sequence

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config


def configured(
    overrides: Sequence[str],
    world_size: int = 1,
    node_ranks: int | None = None,
    device: str = "cpu",
) -> Config:
    """Compose and check a configuration.

    Args:
        overrides: its overrides.
        world_size: ranks.
        node_ranks: ranks of one machine; by default all.
        device: of the ranks.
    """
    config = compose_config(list(overrides))
    config.validate(world_size, device, node_ranks)
    return config
