"""Any ``nn.Module`` from tokens to logits, with the interface of this project's models.

The module keeps its names: this model shares its tables of children, parameters and buffers, so
that a strategy that replaces one of them is seen by the module's own forward. Blocks and head are
found by ``ModuleConfig``; their names may be any.

Initial values are those of the module's own construction: it is built a second time on the host,
with the generators seeded by ``train.init_seed``, and each rank copies its shards. So every layout
starts from the values that ``torch.manual_seed(seed)`` gives in a plain loop. It costs the host
memory of the full model, on every rank, until the model is sharded.

Not covered: parameters that a block and another module share; modules that write to their buffers
in training, such as batch normalization; context, tensor, expert and pipeline parallelism.

Shapes: B batch, T sequence, D width, V vocabulary.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..cache import KeyValueCache
from ..decoder import DecoderModel, RowInitializer
from ..layers import LossFn, matmul_flops
from ..stages import Stage
from .base import ModuleSettings
from .blocks import make_runnable
from .head import TransformersHead

FEW_TOKENS = 8
"""Tokens of the forward that checks a module."""


class ModuleHead(TransformersHead):
    """The module's last layer, which computes the loss where it is called."""

    call: tuple[Tensor, LossFn] | None = None
    """Labels_BT and the loss of the forward that runs; None for logits."""
    result: Tensor | None = None
    """What the last call returned."""

    def forward(self, hidden_BTD: Tensor, *_: Any) -> Tensor:
        """Logits_BTV, or the loss of ``call``."""
        labels_BT, loss_fn = self.call or (None, None)
        self.result = super().forward(hidden_BTD, labels_BT, loss_fn)
        return self.result


class ModuleModel(DecoderModel):
    """A model that is any ``nn.Module``."""

    module: nn.Module
    """The module; not a child of this one, which has the same children."""
    config: ModuleSettings

    def __init__(self, config: ModuleSettings, module: nn.Module) -> None:
        super().__init__()
        self.config = config
        blocks = config.blocks(module)
        head = config.head(module)
        for table in ("_modules", "_parameters", "_buffers"):
            for name in module.__dict__[table]:
                if name != "layers" and hasattr(ModuleModel, name):
                    raise ValueError(
                        f"{type(module).__name__}.{name} has the name of an attribute of "
                        "DecoderModel; rename it"
                    )
            self.__dict__[table] = module.__dict__[table]
        self.__dict__["module"] = module
        names = {id(part): name for name, part in module.named_modules()}
        for hook, part in (("blocks", blocks), ("head", head)):
            if part is not None and id(part) not in names:
                raise ValueError(
                    f"{type(config).__name__}.{hook} returned a module that is no part of "
                    f"{type(module).__name__}; return one of its own"
                )
        own = module._modules.get("layers")
        if own is not None and own is not blocks:
            raise ValueError(
                f"{type(module).__name__}.layers is not the list of blocks of "
                f"{type(config).__name__}, which is kept under this name; rename it"
            )
        self.__dict__["layers"] = nn.ModuleList() if blocks is None else blocks
        self.blocks_name = "" if blocks is None else names[id(blocks)]
        for block in self.layers:
            make_runnable(block)
        self.head_names = () if head is None else (names[id(head)],)
        self.embedding_names = ()
        if head is not None:
            if type(head) is not nn.Linear:
                raise ValueError(
                    f"{type(config).__name__}.head returned a {type(head).__name__}, and losses "
                    "are computed for plain nn.Linear layers only; leave out the method"
                )
            head.__class__ = ModuleHead
        self.__dict__["_head"] = head
        self.is_tied = head is not None and _is_shared(module, head)
        self.__dict__["_host"] = None

    @property
    def has_head(self) -> bool:
        """Whether the head is known, which computes the loss."""
        return self.__dict__["_head"] is not None

    @property
    def width(self) -> int:
        """Width of the head's input, or else of the first lookup table; 1 without both."""
        head = self.__dict__["_head"]
        if head is not None:
            return int(head.in_features)
        widths = (
            module.embedding_dim
            for module in self.modules()
            if isinstance(module, nn.Embedding)
        )
        return next(widths, 1)

    def __setattr__(self, name: str, value: Any) -> None:
        """Show the module what a strategy sets in place of a parameter."""
        super().__setattr__(name, value)
        module = self.__dict__.get("module")
        if module is not None and isinstance(value, Tensor) and name in self.__dict__:
            object.__setattr__(module, name, value)

    def train(self, mode: bool = True) -> "ModuleModel":
        """Set the mode of the module as well."""
        super().train(mode)
        self.module.training = mode
        return self

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        loss_fn: LossFn | None = None,
        cache: KeyValueCache | None = None,
        stage: Stage | None = None,
        hidden_BTD: Tensor | None = None,
    ) -> Tensor:
        """Predict the next token at every position; see ``DecoderModel``.

        With a cache all tokens are computed again. Without a head ``loss_fn`` gets the logits in
        place of hidden states, and None for the weight, which ``linear`` takes.
        """
        assert stage is None, "the configuration was not validated"
        count = tokens_BT.shape[1]
        if cache is not None:
            tokens_BT = cache.add_tokens(tokens_BT)
        if labels_BT is None:
            return self._logits(tokens_BT)[:, -count:]
        if loss_fn is None:
            raise ValueError("labels were given without a loss_fn to compare them with")
        head: ModuleHead | None = self.__dict__["_head"]
        if head is None:
            logits_BTV = self._logits(tokens_BT)
            return loss_fn(logits_BTV.flatten(0, 1), None, labels_BT.flatten())
        head.call = labels_BT, loss_fn
        try:
            loss: Tensor = self.module(tokens_BT)
        finally:
            head.call = None
        result = head.result
        head.result = None
        if loss is not result:
            raise ValueError(
                f"{type(self.module).__name__}.forward does not return what its head returns; "
                f"leave out {type(self.config).__name__}.head"
            )
        return loss

    def _logits(self, tokens_BT: Tensor) -> Tensor:
        logits: object = self.module(tokens_BT)
        kind = type(self.module).__name__
        shape = (*tokens_BT.shape, self.config.vocab_size)
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"{kind}.forward returned {type(logits).__name__}, and must return logits of the "
                f"shape {shape}"
            )
        if logits.shape != shape:
            raise ValueError(
                f"{kind}.forward returned the shape {tuple(logits.shape)} for tokens of "
                f"{tuple(tokens_BT.shape)}, and must return {shape} with model.vocab_size="
                f"{self.config.vocab_size}"
            )
        return logits

    def row_initializer(self) -> RowInitializer:
        """Not used: ``initial_tensors`` has all values."""

        def init_rows(name: str, rows: Tensor, generator: torch.Generator) -> None:
            raise NotImplementedError(f"{name} has no initial values by rows")

        return init_rows

    def initial_tensors(self, seed: int) -> Mapping[str, Tensor]:
        """Initial values of all parameters, of a module that is built on the host."""
        return {
            name: param.detach()
            for name, param in self._host_module(seed).named_parameters()
        }

    def init_buffers(self, device: torch.device) -> None:
        """Copy the buffers of a module that is built on the host."""
        if device.type == "meta":
            return
        owners = dict(self._host_module(None).named_modules())
        for prefix, module in self.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    values = owners[prefix]._buffers[name]
                    assert values is not None
                    module._buffers[name] = values.to(device)
        self.__dict__["_host"] = None

    def _host_module(self, seed: int | None) -> nn.Module:
        """The module on the host; None for the one that was built last."""
        host: nn.Module | None = self.__dict__["_host"]
        if host is None or seed is not None:
            with torch.device("cpu"), _seeded(seed or 0):
                host = self.config.build()
            assert host is not None
            self.__dict__["_host"] = host
        return host

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward per token, as the configuration says or by the sizes of
        matrices."""
        own = self.config.flops_per_token(self.module, seq_len)
        if own is not None:
            return own
        embeddings = {
            module.weight
            for module in self.modules()
            if isinstance(module, nn.Embedding)
        }
        head = self.__dict__["_head"]
        if head is not None:
            embeddings.discard(head.weight)
        return float(
            sum(
                matmul_flops(param.numel(), param.requires_grad)
                for param in self.parameters()
                if param.ndim > 1 and param not in embeddings
            )
        )

    def block_kind(self, index: int) -> tuple[object, ...]:
        """Blocks may differ in all ways."""
        return (index,)

    def check(self) -> None:
        """Check what would train wrongly; on the meta device.

        Raises:
            ValueError: with the first problem.
        """
        kind = type(self.module).__name__
        for path, module in self.module.named_modules():
            where = f"{kind}.{path}" if path else kind
            if isinstance(module, _BatchNorm):
                raise ValueError(
                    f"{where} is batch normalization, which mixes the sequences of a rank's batch "
                    "and writes to its buffers; use nn.LayerNorm or nn.RMSNorm"
                )
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and value.device.type == "meta":
                    raise ValueError(
                        f"{where}.{name} is a tensor that is neither parameter nor buffer, so no "
                        f'strategy would move it; use self.register_buffer("{name}", …)'
                    )
        if not any(True for _ in self.parameters()):
            raise ValueError(f"{kind} has no parameters to train")
        tokens_BT = torch.zeros(
            1,
            min(FEW_TOKENS, self.config.max_seq_len),
            dtype=torch.int64,
            device="meta",
        )
        try:
            with torch.device("meta"):
                self.forward(tokens_BT)
                if self.has_head:
                    self.forward(tokens_BT, tokens_BT, _sum_of_hidden_states)
        except ValueError:
            raise
        except Exception:
            # Code that reads values, or a mistake, which the first step shows with its line
            return

    def notes(self) -> list[str]:
        """Say what is unknown of the module."""
        kind = type(self.module).__name__
        config = type(self.config).__name__
        notes = []
        if not len(self.layers):
            notes.append(
                f"{kind} has no nn.ModuleList of equal blocks: the whole model is one unit, and is "
                f"gathered at once; {config}.blocks would name it"
            )
        if not self.has_head:
            notes.append(
                f"{kind} makes all logits for the plain loss; {config}.head would allow "
                "memory.chunk_loss"
            )
        if any(
            isinstance(module, nn.Dropout) and module.p for module in self.modules()
        ):
            notes.append(
                f"{kind} has dropout, which draws other numbers under another layout"
            )
        return notes


def _sum_of_hidden_states(hidden_ND: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_ND.float().sum()


def find_blocks(module: nn.Module) -> nn.ModuleList | None:
    """Return the list of most parameters among those with modules of one class; None without."""
    lists = [
        child
        for child in module.modules()
        if isinstance(child, nn.ModuleList)
        and len({type(block) for block in child}) == 1
        and type(child[0]).forward is not nn.Module.forward
    ]
    return max(
        lists,
        key=lambda blocks: sum(param.numel() for param in blocks.parameters()),
        default=None,
    )


def _is_shared(module: nn.Module, head: nn.Linear) -> bool:
    owners = [
        child
        for child in module.modules()
        if any(param is head.weight for param in child._parameters.values())
    ]
    return len(owners) > 1


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators that a construction may draw from, and restore them."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
