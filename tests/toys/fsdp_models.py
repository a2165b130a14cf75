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
POLICIES = {"mp_policy": "MixedPrecisionPolicy", "offload_policy": "CPUOffloadPolicy"}


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
        recomputed: Tensor = checkpoint(self.compute, hidden_BTD, use_reentrant=self.recomputes)
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
        self.chunks = 0
        """Into how many the head's input is cut; 0 leaves the head to the forward."""

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
        """Logits, or the input of the head's chunks."""
        normed_BTD: Tensor = self.norm(self.hidden(tokens_BT))
        if self.chunks:
            return normed_BTD
        logits_BTV: Tensor = self.head(normed_BTD)
        return logits_BTV


Shard = Callable[[Any, Model, DeviceMesh], None]


def shard_blocks(library: Any, model: Model, mesh: DeviceMesh, **options: Any) -> None:
    """Each block, then the root with the rest."""
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh, **options)
    library.fully_shard(model, mesh=mesh, **{key: options[key] for key in options if key != "reshard_after_forward"})


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
    """Of ``fully_shard``; policies as the arguments of the library's class."""
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
    alike: int = 1
    """Ranks that take the same tokens."""


@functools.cache
def mesh_of(axes: tuple[int, ...] = ()) -> DeviceMesh:
    sizes = axes or (dist.get_world_size(),)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def build(library: types.ModuleType, case: Case) -> Any:
    """The model of a case, sharded."""
    torch.manual_seed(0)
    attributes = dict(case.model)
    arguments = {key: attributes.pop(key) for key in ("dim", "blocks", "tied") if key in attributes}
    model = Model(**arguments)
    for name, value in attributes.items():
        setattr(model, name, value)
    case.prepare(model)
    options = dict(case.options)
    for option, policy in POLICIES.items():
        if option in options:
            options[option] = getattr(library, policy)(**options[option])
    case.shard(library, model, mesh_of(case.axes), **options)
    case.configure(model)
    return model


def backward(model: Any, tokens_BT: Tensor) -> Tensor:
    """Forward and backward, by chunks of the head if the model has them."""
    output = model(tokens_BT)
    if not model.chunks:
        loss = nn.functional.cross_entropy(output.float().flatten(0, 1), tokens_BT.flatten())
        loss.backward()
        return loss.detach()
    leaf = output.detach().requires_grad_()
    total = torch.zeros(())
    for part_BTD, part_BT in zip(leaf.chunk(model.chunks, 1), tokens_BT.chunk(model.chunks, 1), strict=True):
        loss = nn.functional.cross_entropy(model.head(part_BTD).float().flatten(0, 1), part_BT.flatten())
        loss.backward()
        total += loss.detach()
    output.backward(leaf.grad)
    return total


def batches(steps: int, alike: int = 1) -> list[Tensor]:
    """Other tokens on each rank, or on each ``alike`` ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank() // alike)
    return [torch.randint(VOCABULARY, (2, 6), generator=generator) for _ in range(steps)]


def train(library: types.ModuleType, case: Case, steps: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and norms where gradients are clipped, of a few steps, and the parameters after them."""
    model = build(library, case)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2) if case.clips else torch.optim.SGD(params, lr=0.5)
    seen: list[float] = []
    tokens = iter(batches(steps * case.micro_batches, case.alike))
    for _ in range(steps):
        losses: list[Tensor] = []
        for index in range(case.micro_batches):
            case.before(model, index, case.micro_batches)
            if case.together:
                tokens_BT = next(tokens)
                losses.append(nn.functional.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten()))
            else:
                losses.append(backward(model, next(tokens)))
        if case.together:
            torch.stack(losses).sum().backward()
        seen += [loss.item() for loss in losses]
        if case.clips:
            seen.append(nn.utils.clip_grad_norm_(params, 0.5).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    return seen, whole(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The full parameters by name."""
    return {
        name: value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()
        for name, value in model.state_dict().items()
    }


def assert_matches_native(case: Case) -> None:
    """Compare losses, norms and parameters with those of PyTorch in every bit."""
    ours, theirs = train(TOY, case), train(NATIVE, case)
    assert ours[0] == theirs[0]
    assert {name for name, value in theirs[1].items() if not torch.equal(value, ours[1][name])} == set()
