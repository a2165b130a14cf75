"""A model on copies of its parameters in another dtype."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptoys.config.schema import Config
from fsdptoys.memory import GradientCheckpointing, checkpoint_blocks
from fsdptoys.models import DecoderModel, ModelConfig
from fsdptoys.models.generate import Draw, generate
from fsdptoys.parallel import DDPConfig, SingleConfig
from fsdptoys.parallel.precision import CastParameters, DType
from fsdptoys.train.compile import compile_blocks
from fsdptoys.train.trainer import Trainer
from tests.harness.ranks import run_ranks
from tests.harness.tiny import TINY, make_config, tiny_model


def filled(config: ModelConfig) -> DecoderModel:
    torch.manual_seed(0)
    model: DecoderModel = config.build()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.2)
    model.init_buffers(torch.device("cpu"))
    return model


def test_model_on_cast_parameters_generates_text() -> None:
    """Oracle: the model itself, with copies in its own dtype; generation passes a cache by
    keyword."""
    model = filled(TINY["qwen3"]).eval()
    prompt_T = torch.tensor([3, 1, 4])
    tokens_T = generate(
        CastParameters(model, torch.float32), prompt_T, 6, 16, Draw(0.0)
    )
    assert torch.equal(tokens_T, generate(model, prompt_T, 6, 16, Draw(0.0)))


def test_dropped_model_on_cast_parameters_frees_them() -> None:
    """Oracle: the garbage collector, after a backward. Its graph nodes hold the hooks of
    parameters."""
    model = filled(tiny_model())
    CastParameters(model, torch.bfloat16)(
        torch.tensor([[3, 1, 4]])
    ).float().sum().backward()
    param = weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    assert param() is None


class Casts(TorchDispatchMode):
    """Counts the casts of each parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {param: name for name, param in model.named_parameters()}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0] in self._names:
            self.counts[self._names[args[0]]] += 1
        return func(*args, **(kwargs or {}))


def order_of_gradients(model: DecoderModel) -> list[str]:
    """A list that fills with ``last`` for each gradient of the last block, and ``first`` as the
    first block's backward begins."""
    order: list[str] = []
    for param in model.layers[-1].parameters():
        param.register_post_accumulate_grad_hook(lambda _: order.append("last"))
    model.layers[0].register_full_backward_pre_hook(lambda *_: order.append("first"))
    return order


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize(
    "how", ["plain", "checkpointed", "selective", "compiled", "compiled around"]
)
def test_parameters_are_cast_once_and_gradients_arrive_block_by_block(
    how: str, tied: bool
) -> None:
    """Oracles: the gradients of a forward on copies made up front, bitwise; hooks on gradients; the
    dispatcher."""
    config = tiny_model(tie_embeddings=tied)
    tokens_BT = torch.arange(24).view(2, 12) % 7
    oracle = filled(config)
    copies = {
        name: param.to(torch.bfloat16) for name, param in oracle.named_parameters()
    }
    functional_call(
        oracle, copies, (tokens_BT,), tie_weights=True
    ).float().square().mean().backward()

    model = filled(config)
    mode = (
        GradientCheckpointing.full
        if how in ("checkpointed", "compiled around")
        else GradientCheckpointing.none
    )
    checkpoint_blocks(
        model.layers, GradientCheckpointing.selective if how == "selective" else mode
    )
    if how.startswith("compiled"):
        compile_blocks(
            model.layers, inner_hooks=how == "compiled around", backend="aot_eager"
        )
    order = order_of_gradients(model)
    casting = CastParameters(model, torch.bfloat16)
    casting(tokens_BT)  # a forward without a backward leaves nothing to the next
    with Casts(model) as casts:
        casting(tokens_BT).float().square().mean().backward()
    assert casts.counts == dict.fromkeys(dict(model.named_parameters()), 1)
    assert not casting._copies  # each is freed with its gradient
    assert order == ["last"] * len(list(model.layers[-1].parameters())) + ["first"]
    gradients: dict[str, Tensor | None] = {
        name: param.grad for name, param in model.named_parameters()
    }
    for name, param in oracle.named_parameters():
        assert torch.equal(gradients[name], param.grad), name  # type: ignore[arg-type]


def orders(configs: list[Config]) -> list[list[str]]:
    orders_of_runs = []
    for config in configs:
        trainer = Trainer(config)
        orders_of_runs.append(order_of_gradients(trainer.strategy._unwrapped))  # type: ignore[attr-defined]
        trainer.train()
    return orders_of_runs


def test_ddp_gets_gradients_of_the_last_block_before_the_backward_of_the_first_begins() -> (
    None
):
    """Oracle: hooks on gradients and on the backward."""
    half = {"param_dtype": DType.bfloat16}
    configs = [
        make_config(parallel, 1, steps=1, grad_accum=1, seq_len=8)
        for parallel in (SingleConfig(**half), DDPConfig(**half))
    ]
    for order in run_ranks(1, orders, configs)[0]:
        assert order[-1] == "first"
        assert order.count("last") == len(order) - 1 > 1
