"""Published runs with several axes of parallelism: the rows of ``published_layouts.yaml``, and
their overrides.

Every table of the file has its source. Other programs made the runs, so a row also lists the parts
of its run that the trainer, as ``fsdptoys plan`` traces it, does not have. Rows with equal
overrides on one machine share a trace.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware, load_hardware
from fsdptoys.plan.search.switches import validate_switches
from scripts.planner.published_torchtitan import h100

TABLES = Path(__file__).with_suffix(".yaml")
MACHINES = {"h100_96gb": "H100 with 96 GB at 2.4 TB/s", "h100": "H100", "b200": "B200"}
"""Key of a machine → its name on the page."""


@dataclass(frozen=True)
class PublishedLayout:
    """A published run. Speed and memory are of one GPU."""

    name: str
    source: str
    date: str
    machine: str
    model: str
    """Preset in ``configs/model``."""
    gpus: int
    tokens_per_second: float | None = None
    memory_gib: float | None = None
    """Reserved memory."""
    mfu: float | None = None
    """Published instead of tokens per second."""
    seq_len: int = 0
    batch_size: int = 0
    """Sequences of a micro-batch of the ranks that share sequences (tp, cp and pp)."""
    micro_batches: int = 1
    checkpointing: str = "none"
    """``memory.gradient_checkpointing``, or ``selective_torchtitan``: selective without every other
    matmul."""
    fsdp: int = 1
    """Ranks that shard parameters and have other sequences; cp and tp ranks shard them too."""
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    schedule: str | None = None
    """Order of a pipeline's micro-batches."""
    compile: bool = False
    float8: bool = False
    async_tp: bool = False
    """Whether collectives of tensor parallelism overlap the matmuls that they belong to."""
    loss_parallel: bool = False
    """Whether ranks that split the vocabulary use PyTorch's ``loss_parallel``, with which the row
    is traced."""
    extra_overrides: tuple[str, ...] = ()
    """Further overrides of the trainer."""
    absent: tuple[str, ...] = ()
    """Further differences between the run and the trace."""
    unplanned: str = ""
    """Reason for which the row is only listed."""
    fit: bool = False
    """Whether the speed of matmuls is fitted to this row, one of its machine."""

    @property
    def ranks_of_copy(self) -> int:
        """Ranks that share one copy of the parameters, in all stages."""
        return self.fsdp * self.cp * self.tp * self.pp

    @functools.cached_property
    def speed(self) -> float:
        """Published tokens per second, or those of the published MFU by the trainer's count of
        FLOPs."""
        if self.tokens_per_second is not None:
            return self.tokens_per_second
        assert self.mfu is not None
        with torch.device("meta"):
            flops = self.config().model.build().flops_per_token(self.seq_len)
        return self.mfu * machine(self.machine).peak_flops["bfloat16"].value / flops

    @property
    def tokens(self) -> float:
        """Tokens of one step, divided by the ranks that share them."""
        return (
            self.batch_size
            * self.seq_len
            * self.micro_batches
            / (self.tp * self.cp * self.pp)
        )

    @property
    def layout(self) -> str:
        """The axes with more than one rank."""
        sizes = {"replicas": self.gpus // self.ranks_of_copy, "FSDP": self.fsdp}
        sizes |= {"CP": self.cp, "TP": self.tp, "EP": self.ep, "PP": self.pp}
        return " ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)

    @property
    def numerics(self) -> str:
        """Settings of speed that the trace does not have."""
        names = {
            "compile": self.compile,
            "float8": self.float8,
            "async TP": self.async_tp,
        }
        return ", ".join(name for name, applies in names.items() if applies) or "eager"

    @property
    def missing(self) -> list[str]:
        """Parts of the run that its trace does not have."""
        missing = [name for name in self.numerics.split(", ") if name != "eager"]
        return [*missing, *self.absent]

    def overrides(self) -> list[str]:
        """Overrides of ``fsdptoys plan`` for the row's layout."""
        overrides = [
            "experiment=null",
            f"model={self.model}",
            "parallel=fsdp2",
            "parallel.param_dtype=bfloat16",
            "parallel.reduce_dtype=float32",
            f"mesh.fsdp_size={self.ranks_of_copy // self.pp}",
            f"memory.gradient_checkpointing={self.checkpointing.split('_')[0]}",
            f"train.batch_size={self.batch_size}",
            f"train.seq_len={self.seq_len}",
            f"train.grad_accum={self.micro_batches}",
        ]
        for axis, size in {
            "tp": self.tp,
            "cp": self.cp,
            "ep": self.ep,
            "pp": self.pp,
        }.items():
            if size > 1:
                overrides.append(f"mesh.{axis}_size={size}")
        if self.cp > 1:
            overrides.append("parallel.context=gathered")
        if self.schedule is not None:
            overrides.append(f"parallel.schedule={self.schedule}")
        return [*overrides, *self.extra_overrides]

    @property
    def trace_key(self) -> tuple[str, ...]:
        """Equal for rows that share a trace."""
        loss = "loss_parallel" if self.loss_parallel else ""
        return (
            self.machine,
            str(self.gpus),
            self.checkpointing,
            loss,
            *self.overrides(),
        )

    def config(self) -> Config:
        """The validated configuration."""
        config: Config = compose_config(self.overrides())
        hardware = machine(self.machine)
        validate_switches(
            config,
            self.gpus,
            hardware.device_type,
            int(hardware.devices_per_node.value),
        )
        return config


def read_layouts() -> list[PublishedLayout]:
    """Rows of the file's tables, each with its table's source, machine and common settings."""
    rows = []
    for table in yaml.safe_load(TABLES.read_text(encoding="utf-8")):
        common = table.pop("common", {})
        for row in table.pop("rows"):
            values = table | common | row
            for key in ("extra_overrides", "absent"):
                values[key] = (*common.get(key, ()), *row.get(key, ()))
            rows.append(PublishedLayout(**values | {"date": str(values["date"])}))
    return rows


def machine(key: str) -> Hardware:
    """Hardware of a machine."""
    return h100() if key == "h100_96gb" else load_hardware(key)
