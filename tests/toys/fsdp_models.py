"""Small modules of odd sizes, and a training loop for ``fully_shard`` of either library."""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdptoys.toys import fsdp as toy

NATIVE = torch.distributed.fsdp
TOY = toy
VOCABULARY = 29


class Block(nn.Module):
    """A feed-forward with a residual, of sizes that neither 2 nor 4 ranks divide."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim)
        self.recomputes: bool | None = None

    def compute(self, hidden_BTD: Tensor) -> Tensor:
        """Compute the part that may be recomputed."""
        return hidden_BTD + self.down(torch.relu(self.up(self.norm(hidden_BTD))))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Compute, with or without recomputation in the backward."""
        if self.recomputes is None:
            return self.compute(hidden_BTD)
        recomputed: Tensor = checkpoint(
            self.compute, hidden_BTD, use_reentrant=self.recomputes
        )
        return recomputed


class Model(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, dim: int = 13, blocks: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.around: bool | None = None
        """Whether blocks are checkpointed from outside, and reentrantly."""
        self.twice = False
        """Whether the blocks run a second time."""

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """All before the norm."""
        hidden_BTD: Tensor = self.embed(tokens_BT)
        for block in [*self.blocks] * (2 if self.twice else 1):
            if self.around is None:
                hidden_BTD = block(hidden_BTD)
            else:
                hidden_BTD = checkpoint(block, hidden_BTD, use_reentrant=self.around)
        return hidden_BTD

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits."""
        logits_BTV: Tensor = self.head(self.norm(self.hidden(tokens_BT)))
        return logits_BTV


Shard = Callable[[Any, Model, DeviceMesh], None]


def shard_blocks(library: Any, model: Model, mesh: DeviceMesh, **options: Any) -> None:
    """Each block, then the root with the rest."""
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh, **options)
    library.fully_shard(
        model,
        mesh=mesh,
        **{key: options[key] for key in options if key != "reshard_after_forward"},
    )


def shard_groups(library: Any, model: Model, mesh: DeviceMesh, **options: Any) -> None:
    """The embedding, each block, norm and head together, then a root without parameters."""
    library.fully_shard(model.embed, mesh=mesh, **options)
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh, **options)
    library.fully_shard([model.norm, model.head], mesh=mesh, **options)
    library.fully_shard(model, mesh=mesh, **options)


def shard_tied(library: Any, model: Model, mesh: DeviceMesh) -> None:
    """Embedding, norm and head in one unit, since they share a weight."""
    library.fully_shard([model.embed, model.norm, model.head], mesh=mesh)
    shard_blocks(library, model, mesh)


@dataclass
class Case:
    """A training case."""

    shard: Shard = shard_blocks
    options: dict[str, Any] = field(default_factory=dict)
    """Of ``fully_shard``; the policy as the arguments of the library's class."""
    model: dict[str, Any] = field(default_factory=dict)
    """Of ``Model``, and attributes of it."""
    prepare: Callable[[Model], None] = lambda model: None
    configure: Callable[[Any], None] = lambda model: None
    """After it is sharded."""
    before: Callable[[Any, int, int], None] = lambda model, index, count: None
    """Before a micro-batch."""
    micro_batches: int = 2
    axes: tuple[int, ...] = ()
    """Sizes of the mesh; empty for one axis of all ranks."""
    clips: bool = False
    """Whether gradients are clipped and AdamW takes the steps, rather than SGD."""
    together: bool = False
    """Whether one backward follows the forwards of all micro-batches."""


@functools.cache
def mesh_of(axes: tuple[int, ...] = ()) -> DeviceMesh:
    sizes = axes or (dist.get_world_size(),)
    return init_device_mesh(
        "cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :]
    )


def build(library: types.ModuleType, case: Case) -> Any:
    """The model of a case, sharded."""
    torch.manual_seed(0)
    attributes = dict(case.model)
    arguments = {
        key: attributes.pop(key)
        for key in ("dim", "blocks", "tied")
        if key in attributes
    }
    model = Model(**arguments)
    for name, value in attributes.items():
        setattr(model, name, value)
    case.prepare(model)
    options = dict(case.options)
    if "mp_policy" in options:
        options["mp_policy"] = library.MixedPrecisionPolicy(**options["mp_policy"])
    case.shard(library, model, mesh_of(case.axes), **options)
    case.configure(model)
    return model


def backward(model: Any, tokens_BT: Tensor) -> Tensor:
    """Run forward and backward."""
    loss = nn.functional.cross_entropy(
        model(tokens_BT).float().flatten(0, 1), tokens_BT.flatten()
    )
    loss.backward()
    return loss.detach()


def batches(steps: int) -> list[Tensor]:
    """Draw other tokens on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [
        torch.randint(VOCABULARY, (2, 6), generator=generator) for _ in range(steps)
    ]


def train(
    library: types.ModuleType, case: Case, steps: int = 2
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and norms where gradients are clipped, of a few steps, and the parameters after
    them."""
    model = build(library, case)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = (
        torch.optim.AdamW(params, lr=1e-2)
        if case.clips
        else torch.optim.SGD(params, lr=0.5)
    )
    numbers: list[float] = []
    tokens = iter(batches(steps * case.micro_batches))
    for _ in range(steps):
        losses: list[Tensor] = []
        for index in range(case.micro_batches):
            case.before(model, index, case.micro_batches)
            if case.together:
                tokens_BT = next(tokens)
                losses.append(
                    nn.functional.cross_entropy(
                        model(tokens_BT).flatten(0, 1), tokens_BT.flatten()
                    )
                )
            else:
                losses.append(backward(model, next(tokens)))
        if case.together:
            torch.stack(losses).sum().backward()
        numbers += [loss.item() for loss in losses]
        if case.clips:
            numbers.append(nn.utils.clip_grad_norm_(params, 0.5).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    return numbers, whole(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The full parameters by name."""
    return {
        name: value.full_tensor().clone()
        if hasattr(value, "full_tensor")
        else value.clone()
        for name, value in model.state_dict().items()
    }


def assert_matches_native(case: Case) -> None:
    """Compare losses, norms and parameters with those of PyTorch in every bit."""
    toy = train(TOY, case)
    native = train(NATIVE, case)
    assert toy[0] == native[0]
    assert {
        name
        for name, value in native[1].items()
        if not torch.equal(value, toy[1][name])
    } == set()
