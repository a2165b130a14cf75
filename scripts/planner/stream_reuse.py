"""Predict the memory that the stream-reuse patches save, by the number of FSDP roots in a process.

    python scripts/planner/stream_reuse.py
    python scripts/planner/stream_reuse.py model=llama3_8b --hardware a2

Each case is traced with FSDP1 and FSDP2, without and with the patch, on a device that does not
exist. It is replayed on the planner's allocator, which keeps a pool of freed memory for each
stream, as PyTorch's does.
The runs are those of the trainer:

- one root: a training run;
- frozen reference: a second model's forward after each step, as for a KL term or a moving average
  of the weights;
- second run: a run is deleted, and another one starts in the same process, as in a notebook;
- root per block: each block is sharded by itself and no module contains them all, so that each is a
  root (``reshard_after_forward=True``, or every block would stay gathered).
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)

from fsdptoys.config.compose import compose_config
from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.device.profile import Hardware, load_hardware
from fsdptoys.loss import build_loss
from fsdptoys.patches import apply_patches
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.replay import replay
from fsdptoys.plan.trace.fake_device import PlannedDevice
from fsdptoys.plan.trace.op_costs import matmul_workspace_bytes
from fsdptoys.plan.trace.op_recorder import OpRecorder
from fsdptoys.plan.trace.tracer import tracing_environment
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.tables import markdown_table
from scripts.common.progress import progress, unit
from tests.harness.full_trace import trace_here
from tests.harness.plan_processes import in_fresh_process

RANKS = 8
STEPS = 2
STRATEGIES = ("fsdp1", "fsdp2")
SETTINGS = (
    "experiment=null",
    "model=llama3_1b",
    "train.seq_len=4096",
    "train.batch_size=1",
    f"train.steps={STEPS}",
    "parallel.param_dtype=bfloat16",
    "memory.gradient_checkpointing=full",
    "memory.chunk_loss=true",
)


def settings(overrides: Sequence[str]) -> list[str]:
    """``SETTINGS``, without those that ``overrides`` replace, and the overrides."""
    keys = {override.partition("=")[0] for override in overrides}
    return [
        *(override for override in SETTINGS if override.partition("=")[0] not in keys),
        *overrides,
    ]


def make_trainer(config: Config, recorder: OpRecorder, hardware: Hardware) -> Trainer:
    """A trainer on the planned device."""
    device = PlannedDevice(
        hardware.device_type, hardware.title, int(hardware.memory_bytes.value)
    )
    trainer = Trainer(config, device, param_init=lambda param, name: None)
    trainer.on_phase = recorder.mark
    return trainer


def one_root(config: Config, recorder: OpRecorder, hardware: Hardware) -> None:
    """A training run."""
    make_trainer(config, recorder, hardware).train()


def frozen_reference(config: Config, recorder: OpRecorder, hardware: Hardware) -> None:
    """A second model's forward after each step."""
    trainer, reference = (make_trainer(config, recorder, hardware) for _ in range(2))
    tokens_BT = torch.zeros(
        1,
        config.train.seq_len,
        dtype=torch.int64,
        device=trainer.world.device.torch_device,
    )

    def run_reference(_: Any) -> None:
        with torch.no_grad():
            reference.strategy.model(tokens_BT, tokens_BT, reference.scale.loss_fn)

    trainer.train(on_step=run_reference)


def second_run(config: Config, recorder: OpRecorder, hardware: Hardware) -> None:
    """Two runs, one after the other."""
    for _ in range(2):
        make_trainer(config, recorder, hardware).train()


def root_per_block(config: Config, recorder: OpRecorder, hardware: Hardware) -> None:
    """Blocks that are sharded by themselves; embedding and head are replicated."""
    device = torch.device(recorder.device_type, 0)
    with torch.device("meta"):
        model = config.model.build()
    mesh = DeviceMesh(
        device.type, list(range(dist.get_world_size())), mesh_dim_names=("shard",)
    )
    with apply_patches(config.patches, config.parallel.name):
        for index, block in enumerate(model.layers):
            if config.parallel.name == "fsdp2":
                precision = MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16, cast_forward_inputs=False
                )
                fully_shard(
                    block, mesh=mesh, mp_policy=precision, reshard_after_forward=True
                )
                block.to_empty(device=device)
            else:
                block.to_empty(device=device)
                model.layers[index] = FullyShardedDataParallel(
                    block,
                    process_group=mesh.get_group(),
                    device_id=device,
                    use_orig_params=True,
                    mixed_precision=MixedPrecision(
                        param_dtype=torch.bfloat16, cast_forward_inputs=False
                    ),
                )
        outside: list[nn.Module] = [model.embed_tokens, model.norm, model.lm_head]
        for module in outside:
            module.to_empty(device=device).to(torch.bfloat16)
        for name, buffer in model.named_buffers():
            model.get_submodule(name.rpartition(".")[0]).register_buffer(
                name.rpartition(".")[2],
                torch.zeros_like(buffer, device=device),
                persistent=False,
            )
        loss_fn = build_loss(True, None, torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tokens_BT = torch.zeros(
            1, config.train.seq_len, dtype=torch.int64, device=device
        )
        for step in range(1, STEPS + 1):
            recorder.mark(step, "forward")
            loss = model(tokens_BT, tokens_BT, loss_fn)
            recorder.mark(step, "backward")
            loss.backward()
            recorder.mark(step, "optimizer")
            optimizer.step()
            optimizer.zero_grad()


CASES: dict[str, Callable[[Config, OpRecorder, Hardware], None]] = {
    "one root": one_root,
    "frozen reference": frozen_reference,
    "second run": second_run,
    "root per block": root_per_block,
}


def measure(
    case: str, strategy: str, patched: bool, hardware: Hardware, overrides: list[str]
) -> tuple[int, int, int]:
    """Trace a case in this process, which cannot be used afterwards.

    Returns:
        Streams with memory of their own, peak allocated bytes and reserved bytes.
    """
    patches = f"patches=[{strategy}_stream_reuse]" if patched else "patches=[]"
    config = compose_config([*settings(overrides), f"parallel={strategy}", patches])
    config.validate(RANKS, hardware.device_type)

    def program(recorder: OpRecorder) -> None:
        recorder.mark(0, "construction")
        CASES[case](config, recorder, hardware)
        recorder.mark(STEPS + 1, "end")

    trace = trace_here(
        program,
        attention=hardware.attention,
        world_size=RANKS,
        workspace_bytes=matmul_workspace_bytes(hardware),
    )
    allocator = build_allocator(
        AllocatorKind.expandable, device_type=hardware.device_type
    )
    replayed = replay(trace, hardware, allocator)
    peak = max(phase.peak_bytes for phase in replayed.phases)
    streams = sum(bytes > 0 for bytes in allocator.reserved_by_stream.values())
    return streams, peak, replayed.memory().reserved_bytes


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words",
        nargs="*",
        help="KEY=VALUE settings of the run, in place of the ones above",
    )
    parser.add_argument("--hardware", default="h100", help="a profile of fsdptoys plan")
    arguments = parser.parse_intermixed_args()
    os.environ.update(tracing_environment())
    hardware = load_hardware(arguments.hardware)
    print(f"{arguments.hardware}, {RANKS} ranks: {' '.join(settings(arguments.words))}")
    cells = [["strategy", "case", "patched", "streams with memory"]]
    cells[0] += ["peak allocated (GiB)", "reserved (GiB)"]
    rows = list(itertools.product(STRATEGIES, CASES, (False, True)))
    with progress(len(rows)):
        for strategy, case, patched in rows:
            with unit(f"{strategy}, {case}"):
                streams, peak, reserved = in_fresh_process(
                    measure, case, strategy, patched, hardware, arguments.words
                )
            figures = [str(streams), f"{peak / GIB:.2f}", f"{reserved / GIB:.2f}"]
            cells.append([strategy, case, "yes" if patched else "no", *figures])
    print(markdown_table(cells))


if __name__ == "__main__":
    main()
