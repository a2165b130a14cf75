"""The toy FSDP shards parameters of tensor parallelism, as PyTorch's does."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from scripts.ranks import run_ranks
from tests.toys.fsdp_models import NATIVE, TOY, whole

TP = "tensor"


@functools.cache
def meshes(tensor: int) -> DeviceMesh:
    return init_device_mesh("cpu", (4 // tensor, tensor), mesh_dim_names=("data", TP))


class Stack(nn.Module):
    """Feed-forwards, some of them tensor parallel, and a replicated norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden_BD: Tensor) -> Tensor:
        """Run them with residuals."""
        for layer in self.layers:
            hidden_BD = hidden_BD + layer(hidden_BD)
        normed_BD: Tensor = self.norm(hidden_BD)
        return normed_BD


def parallel(library: Any, width: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model, mesh = Stack(width), meshes(2)
    # DTensors throughout, since tensor parallelism cannot pass on local tensors of unequal sizes.
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh[TP], plan)
        library.fully_shard(layer, mesh=mesh["data"], **options)
    return library.fully_shard(model, mesh=mesh["data"], **{k: v for k, v in options.items() if k == "mp_policy"})


def train(library: Any, width: int, accumulates: bool = False, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, gradient norms and parameters of two steps."""
    if "mp_policy" in options:
        options["mp_policy"] = library.MixedPrecisionPolicy(**options["mp_policy"])
    model = parallel(library, width, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(meshes(2).get_local_rank("data"))
    seen: list[float] = []
    for _ in range(2):
        for last in (False, True) if accumulates else (True,):
            model.set_requires_gradient_sync(last)
            loss = model(torch.randn(4, width, generator=generator)).square().mean()
            loss.backward()
            seen.append(loss.item())
        seen += [param.grad.full_tensor().norm().item() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen, whole(model)


def matches_native(width: int, **options: Any) -> None:
    ours, theirs = train(TOY, width, **options), train(NATIVE, width, **options)
    assert ours[0] == theirs[0]
    assert all(torch.equal(value, ours[1][name]) for name, value in theirs[1].items())


def shows_both_meshes_to_the_optimizer() -> None:
    ours, theirs = parallel(TOY, 6), parallel(NATIVE, 6)
    for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.placements == its.placements and mine.device_mesh == its.device_mesh, name
        assert mine.shape == its.shape and mine.stride() == its.stride()
        assert torch.equal(mine.to_local(), its.to_local())
    layer = ours.layers[0]
    layer.unshard()
    assert isinstance(layer[0].weight, DTensor) and layer[0].weight.placements == (Shard(0),)
    layer.reshard()


REFUSALS: dict[str, Callable[[Any], object]] = {
    "other axes": lambda layer: TOY.fully_shard(layer, mesh=meshes(2)[TP]),
    "as an int": lambda layer: TOY.fully_shard(layer, mesh=meshes(1)["data"], reshard_after_forward=2),
    "reset_parameters": lambda layer: TOY.initialize(TOY.fully_shard(layer, mesh=meshes(2)["data"]), "cpu"),
}


def refuses_unsupported_options_by_name() -> None:
    for match, call in REFUSALS.items():
        layer = nn.Sequential(nn.Linear(4, 4))
        parallelize_module(layer, meshes(2)[TP], {"0": ColwiseParallel()})
        with pytest.raises(NotImplementedError, match=match):
            call(layer)


WIDE_SUMS = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CLAIMS: dict[str, Callable[[], None]] = {
    "uneven": lambda: matches_native(3),
    "not freed": lambda: matches_native(6, reshard_after_forward=False, accumulates=True),
    "mixed precision": lambda: matches_native(8, accumulates=True, mp_policy=WIDE_SUMS),
    "both meshes": shows_both_meshes_to_the_optimizer,
    "refusals": refuses_unsupported_options_by_name,
}


@pytest.mark.skipif(not hasattr(DeviceMesh, "_concatenate"), reason="meshes of this torch cannot be joined")
@pytest.mark.parametrize("claim", CLAIMS)
def test_tensor_parallelism_matches_pytorch_bitwise(claim: str) -> None:
    """Oracle: PyTorch's ``fully_shard`` on two data-parallel times two tensor-parallel ranks, bitwise."""
    run_ranks(4, CLAIMS[claim])
