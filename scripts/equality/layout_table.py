"""Layouts of the rows of ``parity_layouts``: which model and number of ranks each one fits."""

import functools
from dataclasses import dataclass

from fsdptoys.config.compose import compose_config
from fsdptoys.config.train_config import TrainConfig
from fsdptoys.models import ModelConfig, MoEConfig
from fsdptoys.parallel.pipeline import PipelineSchedule

EXTRAS = {
    "llama_debug": "memory.chunk_loss=true",
    "qwen3_debug": "data.mask_documents=true",
}
"""Preset → overrides of all its rows."""


@functools.cache
def model_of(preset: str) -> ModelConfig:
    """A preset of configs/model."""
    return compose_config([f"model={preset}"]).model


STAGED_LAYERS = 4
"""Layers of models in pipelines: one for each of four stages."""


@dataclass(frozen=True)
class Layout:
    """A way to lay out the ranks."""

    overrides: tuple[str, ...]
    shares: int = 1
    """Ranks that share a sequence."""
    split: int = 1
    """Ranks that split the experts."""
    replicas: int = 1
    rings: bool = False
    """Whether it merges partial sums, which the layout mode and masks of documents refuse."""
    features: int = 1
    """Ranks that split features."""
    blocks: int = 1
    """Blocks of ranks with parts of the layers."""

    def of_reference(self, mode: str, preset: str) -> tuple[str, ...]:
        """Overrides that the one process needs too: more grains or slices, to cut into whole ones,
        and key heads."""
        overrides = []
        if (
            mode == "layout"
            and "parallel.context=gathered" in self.overrides
            and 2 * self.shares > TrainConfig.grains
        ):
            overrides.append(f"train.grains={2 * self.shares}")
        if mode == "layout" and self.features > 1:
            overrides.append(f"train.slices={self.features}")
        if getattr(model_of(preset), "n_kv_heads", self.features) % self.features:
            overrides.append(f"model.n_kv_heads={self.features}")
        if self.blocks > 1:
            model = model_of(preset)
            overrides += (
                [f"model.n_layers={STAGED_LAYERS}"]
                if model.n_layers < STAGED_LAYERS
                else []
            )
            overrides += ["model.tie_embeddings=false"] if model.tie_embeddings else []
            # Routers balance the micro-batches so far, and a pipeline needs several; in layout mode
            # those of the step.
            overrides += (
                ["model.router_aux_loss_coef=0"]
                if isinstance(model, MoEConfig) and mode == "default"
                else []
            )
        return tuple(overrides)

    def fits(self, world_size: int, preset: str, mode: str) -> bool:
        """Whether a model can be trained so on this many ranks."""
        ranks = world_size // self.replicas // self.blocks
        model = model_of(preset)
        shard = ranks // self.features
        if self.rings and (
            mode == "layout" or "data.mask_documents=true" in EXTRAS.get(preset, "")
        ):
            return False
        if (model.n_experts if isinstance(model, MoEConfig) else 1) % self.split:
            return False
        if "parallel.context=ulysses" in self.overrides and model.n_heads % (
            self.shares * self.features
        ):
            return False
        whole = (
            ranks * self.replicas * self.blocks == world_size
            and shard * self.features == ranks
        )
        divides = whole and shard % self.shares == 0 and ranks % self.split == 0
        return (
            ranks * self.blocks > 1 and divides and model.n_heads % self.features == 0
        )


def _layouts() -> dict[str, Layout]:
    plain = {name: Layout((f"parallel={name}",)) for name in ("ddp", "fsdp1", "fsdp2")}
    layouts = plain | {"hsdp": Layout((), replicas=2)}
    for form in ("ulysses", "gathered", "ring"):
        for cp in (2, 4):
            layouts[f"cp {cp} {form}"] = Layout(
                (f"parallel.context={form}",), shares=cp, rings=form == "ring"
            )
    layouts["cp 8 gathered"] = Layout(("parallel.context=gathered",), shares=8)
    layouts["hsdp, cp 2"] = Layout((), shares=2, replicas=2)
    layouts |= {f"ep {ep}": Layout((), split=ep) for ep in (2, 4, 8)}
    layouts |= {
        "cp 2, ep 2": Layout((), 2, 2),
        "cp 2, ep 4": Layout((), 2, 4),
        "cp 4, ep 2": Layout((), 4, 2),
    }
    layouts |= {
        "hsdp, ep 2": Layout((), split=2, replicas=2),
        "hsdp, cp 2, ep 2": Layout((), 2, 2, 2),
    }
    layouts |= {f"tp {tp}": Layout((), features=tp) for tp in (2, 4)}
    for form in ("ulysses", "gathered"):
        layouts[f"tp 2, cp 2 {form}"] = Layout(
            (f"parallel.context={form}",), shares=2, features=2
        )
    layouts |= {
        "hsdp, tp 2": Layout((), replicas=2, features=2),
        "tp 2, ep 2": Layout((), split=2, features=2),
    }
    layouts |= {"tp 2, cp 2, ep 4": Layout((), 2, 4, features=2)}
    staged = {
        schedule.value: (f"parallel.schedule={schedule.value}",)
        * (schedule is not PipelineSchedule.gpipe)
        for schedule in PipelineSchedule
    }
    layouts |= {
        f"pp 2 {schedule}": Layout(overrides, blocks=2)
        for schedule, overrides in staged.items()
    }
    layouts |= {
        "pp 4 1f1b": Layout(staged["1f1b"], blocks=4),
        "hsdp, pp 2": Layout((), replicas=2, blocks=2),
    }
    layouts["pp 2, cp 2"] = Layout(
        (*staged["interleaved"], "parallel.context=gathered"), shares=2, blocks=2
    )
    layouts["pp 2, ep 2"] = Layout(staged["zero_bubble"], split=2, blocks=2)
    layouts["pp 2, tp 2"] = Layout(staged["1f1b"], features=2, blocks=2)
    return layouts | {"pp 2, cp 2, ep 2": Layout(staged["1f1b"], 2, 2, blocks=2)}


LAYOUTS = _layouts()
"""Row of a table → layout; FSDP2 unless it names another strategy."""
