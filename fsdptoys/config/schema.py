"""Configuration of a run: the packages' sections in one dataclass, and the checks across sections,
without Hydra."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from fsdptoys.checkpoint import CheckpointConfig, open_init_from
from fsdptoys.data import DATASETS, DataConfig
from fsdptoys.device import DEVICE_TYPES, float64_collectives
from fsdptoys.errors import ConfigError
from fsdptoys.imports import record_imports
from fsdptoys.loss import LOSSES, LossConfig
from fsdptoys.loss.probe import check_own_loss
from fsdptoys.memory import MemoryConfig, OffloadSchedule
from fsdptoys.metrics import MetricsConfig
from fsdptoys.models import MODELS, ModelConfig
from fsdptoys.optim import OPTIMIZERS, OptimConfig
from fsdptoys.parallel import STRATEGIES, ParallelConfig
from fsdptoys.parallel.config import ReducingConfig
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.expert_parallel import check_experts
from fsdptoys.parallel.mesh import MeshConfig
from fsdptoys.parallel.precision import SumDType
from fsdptoys.patches import check_patches
from fsdptoys.tune import TUNINGS, TuneConfig
from fsdptoys.utils.options import check_declared, default_of, refuse_unused

from .option_values import Option
from .own_model import check_own_model
from .rules import MODEL_RULES, RULES, Where, check_rules
from .rules.tune import open_adapter
from .sections import Sections

EVALUATIONS = 4  # default number of evaluations of a run that tunes a model


@dataclass
class Config(Sections):
    """All settings of a run."""

    def count_steps(self, world_size: int) -> str | None:
        """Replace each -1 of ``train`` in a run that tunes a model; return a sentence on the
        counted steps, or None.

        Reads the prepared data. ConfigError if the counted steps contradict other settings.
        """
        train = self.train
        sentence = None
        assert train.data_seed is not None, "the config must have been validated"
        if train.steps == -1:
            rows = len(
                self.data.build(
                    train.seq_len, self.model.vocab_size, train.data_seed
                ).train
            )
            ranks = self.parallel.axes(world_size, self.mesh).data_ranks * getattr(
                self.parallel, "simulated_ranks", 1
            )
            a_step = train.batch_size * train.grad_accum * ranks
            train.steps = -(-rows // a_step)
            sentence = (
                f"train.steps={train.steps}: one pass over {rows:,} rows of {train.seq_len:,} "
                f"tokens, {a_step} a step"
            )
            self.profile.validate(world_size, self.launch.device.value, train.steps)
        if train.eval_every == -1:
            train.eval_every = (
                -(-train.steps // EVALUATIONS) if self.data.has_eval else 0
            )
            if train.eval_every and sentence:
                sentence += (
                    f"; train.eval_every={train.eval_every}, since a part is held out"
                )
        return sentence

    def validate(
        self, world_size: int, device_type: str, node_ranks: int | None = None
    ) -> None:
        """Resolve every ``auto``, and check the sections against each other, before any worker
        starts.

        ``world_size`` counts the ranks of all nodes, ``node_ranks`` those of each; None for a
        single node. ConfigError for the first mistake, in one sentence that names key, value and
        fix.
        """
        assert device_type in DEVICE_TYPES
        values = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        sections = {
            name: value
            for name, value in values.items()
            if dataclasses.is_dataclass(value)
        }
        for section in sections:
            refuse_unused(sections, section)
        self.check_model()
        where = self._resolve(world_size, device_type, node_ranks or world_size)
        check_own_model(self.model)
        check_rules(MODEL_RULES, self, where)
        self.parallel.check_model(self.model)
        self.parallel.validate(
            world_size, self.mesh, device_type, self.memory.cpu_offload
        )
        check_experts(self.model, where.axes)
        check_rules(RULES, self, where)
        check_own_loss(self.loss, self.model.vocab_size)
        self.data.check_documents()
        self.data.validate(self.train.seq_len, self.model.vocab_size)
        self.check_evaluation()
        if self.train.steps != -1:
            self.profile.validate(world_size, device_type, self.train.steps)
        self.debug.validate(self.train.compile, self.kernels.compiles)
        try:
            check_patches(self.patches, self.parallel.name)
        except ValueError as mistake:
            # Patches do not import ConfigError, but word their messages alike
            raise ConfigError(str(mistake)) from mistake
        if self.model.init_from is not None or self.tune.freezes:
            with torch.device("meta"):
                model = self.model.build()
            if self.model.init_from is not None:
                open_init_from(model)
            open_adapter(self.tune, model)

    def check_model(self) -> None:
        """Check the settings of the model by themselves."""
        try:
            self.model.check()
        except ConfigError:
            raise
        except ValueError as mistake:
            # models do not import ConfigError, but word their messages alike
            raise ConfigError(str(mistake)) from mistake

    def _resolve(self, world_size: int, device_type: str, node_ranks: int) -> Where:
        """Replace every ``auto`` by its value."""
        train = self.train
        parallel = self.parallel
        optim = self.optim
        memory = self.memory
        train.resolve()
        self.mesh.resolve(world_size, node_ranks)
        if train.sum_dtype is SumDType.auto:
            train.sum_dtype = (
                SumDType.float64
                if float64_collectives(device_type)
                else SumDType.float32
            )
        parallel.resolve(train.deterministic)
        if not self.model.capabilities.own_kernels:
            self.kernels.leave_to_model()
        self.kernels.resolve(
            device_type,
            compiles=train.compile,
            deterministic=train.deterministic,
            fuses=not self.debug.trace_collectives,
        )
        axes = parallel.axes(world_size, self.mesh, getattr(self.model, "n_experts", 0))
        if (
            isinstance(parallel, ReducingConfig)
            and axes.cp > 1
            and parallel.context is ContextForm.auto
        ):
            whole_heads = self.model.n_heads // axes.tp % axes.cp == 0
            parallel.context = (
                ContextForm.ulysses
                if whole_heads
                else parallel.capabilities.context_forms[1]
            )
        optim.resolve(
            device_type,
            deterministic=bool(train.deterministic),
            on_host=memory.cpu_offload,
        )
        if memory.optimizer_offload and memory.offload_schedule is OffloadSchedule.auto:
            # The fastest that keeps no gradients between steps
            memory.offload_schedule = OffloadSchedule.pipelined
        return Where(world_size, device_type, axes)

    def check_evaluation(self) -> None:
        """Check that the data has a held-out split if ``eval_every`` is set; some data knows it
        only once prepared."""
        train = self.train
        if train.eval_every > 0 and not self.data.has_eval:
            raise ConfigError(
                f"train.eval_every={train.eval_every} (typed, or set by the experiment) needs a "
                f"held-out part, which data={self.data.name} does not have as set; set "
                f"{self.data.eval_fix} or train.eval_every=0"
            )

    def to_dict(self) -> dict[str, Any]:
        """The full tree as dicts, lists, strings and numbers, with the records of own code that is
        loaded."""
        records = record_imports()
        return dict(_plain(self)) | ({"imports": records} if records else {})

    def defaults(self) -> dict[str, Any]:
        """Return key → default of the chosen sections, as in :meth:`to_dict`."""
        sections = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        for section in ("writers", "callbacks"):
            for name, options in sections.pop(section).items():
                sections[f"{section}.{name}"] = options
        return {
            f"{name}.{option.name}": _plain(default_of(option))
            for name, section in sections.items()
            if dataclasses.is_dataclass(section)
            for option in dataclasses.fields(section)
        }


NAMED = (ParallelConfig, DataConfig, OptimConfig, TuneConfig, LossConfig)
"""Sections that a word after ``GROUP=`` chooses, whose ``name`` says which."""


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        # In sections with several dataclasses, ``name`` says which one; a model's ``name`` is its
        # preset.
        kind = {"name": value.name} if isinstance(value, NAMED) else {}
        kind |= {"family": value.family} if isinstance(value, ModelConfig) else {}
        return kind | {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


SCHEMAS: dict[str, Mapping[str, type]] = {
    "model": MODELS,
    "parallel": STRATEGIES,
    "mesh": {"full": MeshConfig},
    "memory": {"none": MemoryConfig},
    "data": DATASETS,
    "optim": OPTIMIZERS,
    "tune": dict(TUNINGS),
    "loss": LOSSES,
    "checkpoint": {"default": CheckpointConfig},
    "metrics": {"default": MetricsConfig},
}
"""Group → name of the ``base_<name>`` schema → dataclass; live where own code registers
classes."""

ROOT_OPTIONS = {
    field.name: Option(Any, field.default)
    for field in dataclasses.fields(Config)
    if field.default is not dataclasses.MISSING
}
"""Keys outside of any section."""

for _section, _kind in typing.get_type_hints(Config).items():
    for _schema in (_kind, *SCHEMAS.get(_section, {}).values()):
        if _section != "model":  # models/ declares its own
            check_declared(_schema)
