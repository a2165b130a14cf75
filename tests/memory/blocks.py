"""Small models under gradient checkpointing, for the tests of this folder."""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptoys.models import DecoderModel, LlamaConfig, ModelConfig, routers

LLAMA = LlamaConfig(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=40, max_seq_len=32)


def loss_sum(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(hidden_ND @ weight_VD.T, labels_N, reduction="sum")


def build(config: ModelConfig = LLAMA) -> DecoderModel:
    """A model on the CPU with values that depend only on parameter names."""
    model = config.build()
    model.init_buffers(torch.device("cpu"))
    for name, param in model.named_parameters():
        model.init_rows(name, param.data, torch.Generator().manual_seed(len(name)))
    return model


def forward(model: DecoderModel, seed: int = 1) -> Tensor:
    """The loss of one micro-batch; routers get a gradient, as between forward and backward of a training step."""
    tokens_BT = torch.randint(0, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(tokens_BT, tokens_BT, loss_sum)
    for router in routers(model):
        router.sums_grad.copy_(torch.linspace(-2, 3, router.sums_grad.numel()))
    return loss


def gradients(model: DecoderModel) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert bitwise equality."""
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name


class Operators(TorchDispatchMode):
    """Counts operators, and tracks their live output tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.calls[func] += 1
        for result in results if isinstance(results, (tuple, list)) else (results,):
            # Views, for example of parameters, allocate nothing.
            if isinstance(result, Tensor) and not any(ret.alias_info for ret in func._schema.returns):
                storage = result.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return results

    def alive_bytes(self) -> int:
        """Bytes of all created tensors with live references."""
        return sum(nbytes for storage, nbytes in self._made.values() if not storage.expired())
