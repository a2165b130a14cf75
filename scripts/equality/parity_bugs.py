"""Bugs of sharded training that other projects have shipped, injected into a run to see whether
parity catches them.

    python scripts/parity.py --inject all

Each is a patch of this process before it forks the ranks, for one layout and one model. The run is
compared with one process as in ``parity_layouts``: it is caught if something differs at step 1 that
the mode promises to be equal. Beside it stands the tolerance that many projects use for such
comparisons: every loss of 20 steps within 1e-3 relative.

Reported, or like one that was, in: pytorch#160285 and transformers#48205 (experts),
Megatron-LM#7452, #5956 and #5916 (partial sums, norms, routers), torchtitan#2318 and #1750
(factors), Automodel#2995 and VeOmni#338 (cut sequences), text-generation-inference#1036 and
torchtitan#4332 (biases), transformers#34191 and #34373 (means), pytorch#170862 (norms).
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.loss.objective import IGNORE_INDEX
from fsdptoys.models.block_attention import Block, GradientsOfBlocks
from fsdptoys.models.decoder import NativeModel
from fsdptoys.models.moe import Experts, Router
from fsdptoys.models.rotary import RotaryModel
from fsdptoys.parallel import gathered
from fsdptoys.parallel.fsdp2 import FSDP2
from fsdptoys.parallel.strategy import Strategy
from fsdptoys.train import moe_balance, step_data, trainer
from fsdptoys.train.gradient_scale import GradientScale, StepScale
from scripts.common.progress import progress
from scripts.equality.layout_table import LAYOUTS
from scripts.equality.parity_compare import Comparison, Trajectory
from scripts.equality.parity_layouts import (
    GRADIENT_TOLERANCE,
    LAYOUT_MODES,
    Training,
    compare_layouts,
    count_rows,
    layout_configs,
    reference_of,
    train_and_compare,
)
from scripts.equality.parity_stage_bugs import (
    divide_after_the_backward,
    forget_other_stages_in_the_norm,
    keep_the_last_micro_batch,
    send_another_micro_batch,
)
from scripts.equality.parity_tensor_bugs import (
    add_biases_on_every_rank,
    count_norm_weights_on_every_rank,
    divide_gradients_of_biases,
    keep_gradients_of_own_tokens,
    shift_classes,
)
from tests.harness.ranks import run_ranks

ORDINARY_TOLERANCE = 1e-3
"""Relative difference of losses that many comparisons allow."""


@dataclass(frozen=True)
class Bug:
    """A mistake, and where to make it."""

    patch: Callable[[], Any]
    """Returns a context in which ranks are forked."""
    layout: str
    """Of ``layout_table.LAYOUTS``."""
    model: str = "llama_debug"
    world_size: int = 4
    mode: str = "layout"


def average_experts() -> Any:
    """Experts' gradients are averaged over the ranks that share them, and the loss is scaled by all
    ranks."""
    sum_gradients = FSDP2._sum_gradients

    def average(self: FSDP2, units: list[Any]) -> None:
        sum_gradients(self, units)
        for unit in units:
            if isinstance(unit, Experts):
                unit.set_gradient_divide_factor(
                    self.mesh_axes.efsdp / self.world.world_size
                )  # type: ignore[operator]

    return mock.patch.object(FSDP2, "_sum_gradients", average)


def drop_partial_sums() -> Any:
    """Each rank keeps its own gradient of gathered keys and values, without the other ranks'
    queries."""

    def keep_own(full: Tensor, group: dist.ProcessGroup) -> Tensor:
        ranks = group.size()
        rank = group.rank()
        pieces = full.chunk(2 * ranks, dim=-2)
        return torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank]), dim=-2)

    return mock.patch.object(gathered, "scatter_sequence", keep_own)


def shift_labels_after_the_cut() -> Any:
    """The last token of each rank's part has no label."""
    forward = NativeModel.forward

    def without_last_labels(
        self: NativeModel, tokens: Tensor, labels: Tensor | None = None, *args: Any
    ) -> Tensor:
        if labels is not None and self.context.ranks > 1:
            size = labels.shape[1] // self.context.ranks
            labels = labels.clone()
            labels[:, size - 1 :: size] = IGNORE_INDEX
        return forward(self, tokens, labels, *args)

    return mock.patch.object(NativeModel, "forward", without_last_labels)


def count_replicas_in_the_norm() -> Any:
    """The squares of gradients are added up over all ranks, replicas included."""
    return mock.patch.object(Strategy, "total_norm", _norm_over_all_ranks)


def _norm_over_all_ranks(self: Strategy, norms: list[Tensor]) -> Tensor:
    total = torch.cat([norm.flatten() for norm in norms]).double().square().sum()
    dist.all_reduce(total)
    return total.sqrt().float()


def divide_by_data_ranks() -> Any:
    """The loss is scaled by the data-parallel ranks, and gradients are averaged over all ranks."""
    return _scale_losses(lambda: 0.5)  # two ranks share a sequence


def _scale_losses(share: Callable[[], float]) -> Any:
    """Multiply losses by a factor before the backward."""
    of = GradientScale.of

    def wrong(self: GradientScale, *args: Any) -> StepScale:
        scale = of(self, *args)
        return scale._replace(
            per_token=scale.per_token * share(), factor=scale.factor * share()
        )

    return mock.patch.object(GradientScale, "of", wrong)


def detach_routers() -> Any:
    """No gradient reaches the routers through the weights of the chosen experts."""
    finish = Router.finish
    return mock.patch.object(
        Router, "finish", lambda self, *choice: finish(self, *choice).detach()
    )


def start_positions_at_zero() -> Any:
    """Each rank rotates its part of a sequence as if it began there."""
    rotations = RotaryModel.rotations
    return mock.patch.object(
        RotaryModel,
        "rotations",
        lambda self, positions: rotations(self, positions - positions[0]),
    )


def balance_local_batches() -> Any:
    """The load-balancing loss of each rank uses the expert counts of its own tokens."""
    before_backward = moe_balance.RoutingBalance.before_backward

    def without_ranks(self: moe_balance.RoutingBalance) -> None:
        with mock.patch.object(dist, "all_reduce", lambda *args, **kwargs: None):
            before_backward(self)

    return mock.patch.object(
        moe_balance.RoutingBalance, "before_backward", without_ranks
    )


def count_padding() -> Any:
    """The loss is divided by all tokens, those without a label included."""
    return mock.patch.object(step_data, "IGNORE_INDEX", IGNORE_INDEX - 1)


def accumulate_in_bf16() -> Any:
    """Gradients of keys and values are rounded to bf16 whenever a rank has added its part."""
    add = GradientsOfBlocks.add

    def rounded(
        self: GradientsOfBlocks,
        block: Block,
        k: Tensor,
        v: Tensor,
        grad_k: Tensor,
        grad_v: Tensor,
    ) -> None:
        add(self, block, k, v, grad_k, grad_v)
        for grad in (grad_k, grad_v):
            grad.copy_(grad.bfloat16())

    return mock.patch.object(GradientsOfBlocks, "add", rounded)


@contextmanager
def average_means_of_ranks() -> Iterator[None]:
    """Each rank divides its loss by its own tokens for the backward, which averages over ranks."""
    share = [1.0]

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, values: Tensor, *args: Any, **options: Any) -> Any:
            own = values[0].item()
            dist.all_reduce(values, *args, **options)
            if values.dtype == torch.int64:  # the counts of a step
                share[0] = values[0].item() / (own * dist.get_world_size())

    with (
        mock.patch.object(trainer, "dist", Counting()),
        _scale_losses(lambda: share[0]),
    ):
        yield


def clip_by_the_norm_of_a_shard() -> Any:
    """Each rank clips by the norm of the gradients that it has."""

    def norm_of_shard(self: Strategy, norms: list[Tensor]) -> Tensor:
        return torch.cat([norm.flatten() for norm in norms]).double().norm().float()

    return mock.patch.object(Strategy, "total_norm", norm_of_shard)


BUGS = {
    "averaged experts": Bug(average_experts, "ep 2", "qwen3_moe_debug"),
    "dropped partial sum": Bug(drop_partial_sums, "cp 2 gathered"),
    "labels shifted after the cut": Bug(shift_labels_after_the_cut, "cp 2 ulysses"),
    "replicas counted in the norm": Bug(count_replicas_in_the_norm, "hsdp"),
    "wrong divide factor": Bug(divide_by_data_ranks, "cp 2 ulysses"),
    "missing router gradient": Bug(detach_routers, "ep 2", "qwen3_moe_debug"),
    "positions from zero on each rank": Bug(start_positions_at_zero, "cp 2 ulysses"),
    "auxiliary loss of the local batch": Bug(
        balance_local_batches, "ep 2", "qwen3_moe_debug"
    ),
    "padding counted as valid": Bug(count_padding, "fsdp2"),
    "ring accumulates in bf16": Bug(accumulate_in_bf16, "cp 4 ring", mode="default"),
    "classes of a rank off by one": Bug(shift_classes, "tp 2"),
    "norm weights counted on each rank": Bug(count_norm_weights_on_every_rank, "tp 2"),
    "missing all-reduce of norms' gradients": Bug(keep_gradients_of_own_tokens, "tp 2"),
    "division after the last stage's backward": Bug(
        divide_after_the_backward, "pp 2 gpipe"
    ),
    "last micro-batch alone": Bug(keep_the_last_micro_batch, "pp 2 1f1b"),
    "norm of one stage": Bug(forget_other_stages_in_the_norm, "pp 4 1f1b"),
    "activations of another micro-batch": Bug(
        send_another_micro_batch, "pp 2 interleaved"
    ),
    "bias of rows on each rank": Bug(add_biases_on_every_rank, "tp 2", "gpt2_debug"),
    "gradient of row biases divided": Bug(
        divide_gradients_of_biases, "tp 2", "gpt2_debug"
    ),
    "average of the ranks' means": Bug(average_means_of_ranks, "fsdp2"),
    "norm of the rank's own shard": Bug(clip_by_the_norm_of_a_shard, "fsdp2"),
}
"""Name → bug."""


@dataclass(frozen=True)
class Catch:
    """Whether and how a bug was found."""

    sentence: str
    """The first difference of step 1 that the mode excludes; empty if there is none."""
    loss_difference: float
    """Largest relative difference of a loss."""

    @property
    def passes_ordinarily(self) -> bool:
        """Whether losses alone, with the ordinary tolerance, would have hidden the bug."""
        return self.loss_difference <= ORDINARY_TOLERANCE


def inject(bug: Bug, name: str, training: Training, reference: Trajectory) -> Catch:
    """Train with a bug on fresh ranks, and compare with one process without it."""
    configs = layout_configs({bug.layout: 0}, training, bug.world_size)
    with bug.patch():
        rows: list[Comparison] = run_ranks(
            bug.world_size,
            train_and_compare,
            list(configs.values()),
            [reference],
            [name],
        )[0]
    (row,) = rows
    # Smaller differences of the default mode may be rounding.
    over = 0.0 if bug.mode == "layout" else GRADIENT_TOLERANCE
    return Catch(row.first(step=1, over=over), row.loss_difference)


def inject_all(
    names: Sequence[str], steps: int, seq_len: int, console: Console
) -> list[str]:
    """Print a table of bugs; return those that were not caught."""
    table = Table(title=f"injected bugs, {steps} steps")
    for column in (
        "bug",
        "layout",
        "mode",
        "first difference",
        "largest loss difference",
        "loss within 1e-3?",
    ):
        table.add_column(column, justify="right" if "largest" in column else "left")
    make_reference = functools.cache(reference_of)
    missed = []
    hidden = 0
    for name in names:
        bug = BUGS[name]
        training = Training(bug.model, "float32", bug.mode, steps, seq_len)
        more = LAYOUTS[bug.layout].of_reference(bug.mode, bug.model)
        catch = inject(bug, name, training, make_reference(training, more))
        where = f"{bug.model}, {bug.layout}, {bug.world_size} ranks"
        passes = "yes" if catch.passes_ordinarily else "no"
        table.add_row(
            name,
            where,
            bug.mode,
            catch.sentence or "NOT FOUND",
            f"{catch.loss_difference:.1e}",
            passes,
        )
        missed += [] if catch.sentence else [f"{name} was not found at step 1"]
        hidden += catch.passes_ordinarily
    console.print(table)
    caught = len(names) - len(missed)
    console.print(
        f"{caught} of {len(names)} bugs caught at step 1; {hidden} would have passed losses within "
        f"{ORDINARY_TOLERANCE:g} over {steps} steps\n"
    )
    return missed


def compare_all(args: argparse.Namespace, console: Console) -> list[str]:
    """Print the tables of layouts and of bugs that the command line asks for; return the breaches.

    Raises:
        ConfigError: for a device, since a bug is a patch of this process that only forked ranks
            have.
    """
    if args.device != "cpu":
        raise ConfigError(
            f"--layouts and --inject run on CPU ranks only, not on {args.device}; set --device cpu"
        )
    tables = [
        Training(model, dtype, mode, args.steps, args.seq_len)
        for model in args.models
        for mode in LAYOUT_MODES
        for dtype in args.dtypes
        if mode == "layout" or dtype == "float32"
    ]
    breaches: list[str] = []
    with progress(count_rows(args, tables) + len(args.inject or [])):
        for training in tables if args.layouts else []:
            breaches += compare_layouts(args, training, console)
        if args.inject:
            breaches += inject_all(args.inject, args.steps, args.seq_len, console)
    return breaches
