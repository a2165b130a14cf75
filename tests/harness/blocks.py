"""Small models under gradient checkpointing, and streams that record their use."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptoys.models import DecoderModel, LlamaConfig, ModelConfig, routers

LLAMA = LlamaConfig(
    dim=32,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=48,
    vocab_size=40,
    max_seq_len=32,
)


def loss_sum(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(hidden_ND @ weight_VD.T, labels_N, reduction="sum")


def build(config: ModelConfig = LLAMA) -> DecoderModel:
    """A model on the CPU with values that depend only on parameter names."""
    model = config.build()
    model.init_buffers(torch.device("cpu"))
    init_rows = model.row_initializer()
    for name, param in model.named_parameters():
        init_rows(name, param.data, torch.Generator().manual_seed(len(name)))
    return model


def forward(model: DecoderModel, seed: int = 1) -> Tensor:
    """The loss of one micro-batch; routers get a gradient, as between forward and backward of a
    training step."""
    tokens_BT = torch.randint(
        0,
        model.config.vocab_size,
        (2, 24),
        generator=torch.Generator().manual_seed(seed),
    )
    loss: Tensor = model(tokens_BT, tokens_BT, loss_sum)
    for router in routers(model):
        router.sums_grad.copy_(torch.linspace(-2, 3, router.sums_grad.numel()))
    return loss


def gradients(model: DecoderModel) -> dict[str, Tensor]:
    return {
        name: param.grad
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def assert_equal(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert bitwise equality."""
    assert grads.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(grads[name], gradient), name


class Operators(TorchDispatchMode):
    """Counts operators, and tracks their live output tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self.calls[func] += 1
        for result in results if isinstance(results, (tuple, list)) else (results,):
            # Views, for example of parameters, allocate nothing.
            if isinstance(result, Tensor) and not any(
                ret.alias_info for ret in func._schema.returns
            ):
                storage = result.untyped_storage()
                self._storages[storage._cdata] = (
                    StorageWeakRef(storage),
                    storage.nbytes(),
                )
        return results

    def alive_bytes(self) -> int:
        """Bytes of all created tensors with live references."""
        return sum(
            nbytes
            for storage, nbytes in self._storages.values()
            if not storage.expired()
        )


class RecordedStreams:
    """A device module on a CPU: streams that record their calls and run immediately."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.count = 0
        self.now = self.Stream()

    def is_available(self) -> bool:
        """Asked by a PyTorch that was built for an accelerator."""
        return False

    def Stream(self, device: torch.device | None = None) -> Any:  # noqa: N802 (the module's word)
        """Make a stream, named by its number: 0 computes."""
        name = str(self.count)
        self.count += 1

        def record_event() -> Any:
            self.log.append(f"{name} marks")
            return SimpleNamespace(by=name)

        return SimpleNamespace(
            name=name,
            wait_event=lambda event: self.log.append(f"{name} waits for {event.by}"),
            wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"),
            record_event=record_event,
        )

    def Event(self) -> Any:  # noqa: N802
        """Make an event that records its stream."""
        event = SimpleNamespace(
            by=None, synchronize=lambda: self.log.append(f"host waits for {event.by}")
        )
        event.record = lambda stream: setattr(event, "by", stream.name)
        return event

    def current_stream(self, device: torch.device) -> Any:
        """The stream that receives work."""
        return self.now

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Send work to a stream."""
        before, self.now = self.now, stream
        yield
        self.now = before
        self.log.append(f"copied on {stream.name}")
