"""Settings of ``debug``: what a run can be asked to tell of itself."""

from dataclasses import dataclass

from fsdptoys.errors import ConfigError


@dataclass
class DebugConfig:
    """What a run tells of its inside."""

    trace_collectives: bool = False
    """Print every collective of one step with its sizes, and write them to ``collectives.jsonl``."""

    def validate(self, compiles: bool, compiles_kernels: bool) -> None:
        """Refuse where it cannot work.

        Args:
            compiles: ``train.compile``.
            compiles_kernels: whether any of ``kernels`` is ``compiled``.

        Raises:
            ConfigError: naming key, value and fix.
        """
        if self.trace_collectives and compiles:
            raise ConfigError(
                "debug.trace_collectives=true is a dispatch mode, under which PyTorch does not compile as "
                "train.compile=true asks; set train.compile=false, which takes the same collectives"
            )
        if self.trace_collectives and compiles_kernels:
            raise ConfigError(
                "debug.trace_collectives=true is a dispatch mode, under which PyTorch does not compile as "
                "kernels.*=compiled asks; set them to torch, which takes the same collectives"
            )
