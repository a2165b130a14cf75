"""The head of a model of transformers: a linear layer, and what the model does to its logits.

Logits are ``c · tanh(s · (W·h + b) / c)`` with a scale s, a soft cap c and a bias b, each of which
a model may lack. The scale is applied to hidden states and bias; the loss applies bias and soft cap
(``fsdptoys.loss``). ``find_form`` finds s and c by running the model's own forward with stubs in
place of decoder and head, without weights; any other form is refused.

Shapes: B batch, T sequence, D width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import LossFn, matmul_flops
from ..ops import Layer

CLASSES = 9
"""Classes of the stub's logits."""


@dataclass(frozen=True)
class HeadForm:
    """What becomes of the product of hidden states and weight."""

    scale: float = 1.0
    """Factor on the logits, bias included."""
    softcap: float | None = None
    """Bound of the logits' magnitude, reached by a tanh; None without."""

    def apply(self, logits: Tensor) -> Tensor:
        """Return the model's logits."""
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap


class TransformersHead(Layer, nn.Linear):
    """The output projection, which computes an injected loss inside its own forward."""

    form: HeadForm = HeadForm()

    def forward(
        self,
        hidden_BTD: Tensor,
        labels_BT: Tensor | None = None,
        loss_fn: LossFn | None = None,
    ) -> Tensor:
        """Logits_BTV, or ``loss_fn(hidden_ND, weight_VD, labels_N)`` if labels are given.

        A head with a bias or a soft cap also passes ``bias_V`` and ``softcap``.
        """
        # a residual stream may be float32 in every dtype
        hidden_BTD = hidden_BTD.to(self.weight.dtype)
        scale = self.form.scale
        bias_V: Tensor | None = self.bias
        if scale != 1:
            hidden_BTD = hidden_BTD * scale
            bias_V = None if bias_V is None else bias_V * scale
        if labels_BT is None:
            logits_BTV = nn.functional.linear(hidden_BTD, self.weight, bias_V)
            return self.form.apply(logits_BTV)
        if loss_fn is None:
            raise ValueError("labels were given without a loss_fn to compare them with")
        further: dict[str, Any] = {}
        if bias_V is not None:
            further["bias_V"] = bias_V
        if self.form.softcap is not None:
            further["softcap"] = self.form.softcap
        return loss_fn(
            hidden_BTD.flatten(0, 1), self.weight, labels_BT.flatten(), **further
        )

    def own_flops(self, seq_len: int) -> float:
        """FLOPs of its matmul."""
        return matmul_flops(self.weight.numel(), self.weight.requires_grad)


@torch.no_grad()
def find_form(causal_lm: nn.Module, decoder: nn.Module, head: nn.Module) -> HeadForm:
    """Find what a model does to the logits of its head.

    Args:
        causal_lm: of transformers, on any device.
        decoder: the module of it with the blocks.
        head: its output projection.

    Raises:
        ValueError: if it does something else.
    """
    with torch.device("cpu"):
        return _find_form(causal_lm, decoder, head)


def _find_form(causal_lm: nn.Module, decoder: nn.Module, head: nn.Module) -> HeadForm:
    name = type(causal_lm).__name__
    width = head.in_features
    assert isinstance(width, int)
    hidden_BTD = torch.linspace(-1, 1, 2 * width).view(1, 2, width)
    # small values show the scale, large ones the cap
    logits_BTV = torch.linspace(-3, 3, 2 * CLASSES).view(1, 2, CLASSES).clone()
    logits_BTV[0, 0, 0] = 1e-4
    logits_BTV[0, 1, -1] = 1e9
    head_inputs: list[Tensor] = []
    decoder_inputs: list[Tensor] = []
    tokens_BT = torch.zeros(1, 2, dtype=torch.int64)

    def head_forward(hidden: Tensor) -> Tensor:
        head_inputs.append(hidden)
        return logits_BTV.clone()

    def decoder_forward(*args: Any, **kwargs: Any) -> _Output:
        decoder_inputs.extend(
            value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)
        )
        return _Output(hidden_BTD.clone())

    refusal = (
        f"{name} computes its logits in a way that this project does not know; train another "
        "model"
    )
    stubs = ((decoder, decoder_forward), (head, head_forward))
    for module, stub in stubs:
        object.__setattr__(module, "forward", stub)
    try:
        output = causal_lm(input_ids=tokens_BT, use_cache=False)
        result = output[0] if isinstance(output, tuple) else output.logits
    except Exception as mistake:  # foreign code, called with stubs
        raise ValueError(
            f"{refusal} ({type(mistake).__name__} with a stub)"
        ) from mistake
    finally:
        for module, _ in stubs:
            object.__delattr__(module, "forward")
    if len(decoder_inputs) != 1 or decoder_inputs[0] is not tokens_BT:
        raise ValueError(
            f"{name} gives its decoder more than token ids; train another model"
        )
    if len(head_inputs) != 1 or head_inputs[0].shape != hidden_BTD.shape:
        raise ValueError(refusal)
    before = _ratio(head_inputs[0], hidden_BTD)
    form = None if before is None else _form_of(logits_BTV, result, before)
    if form is None:
        raise ValueError(refusal)
    return form


def _ratio(scaled: Tensor, original: Tensor) -> float | None:
    """The number that one tensor is a multiple of another by; None if it is none."""
    if torch.equal(scaled, original):
        return 1.0
    index = original.abs().argmax()
    ratio = (scaled.flatten()[index] / original.flatten()[index]).item()
    matches = torch.allclose(scaled, original * ratio, rtol=1e-5, atol=0)
    return ratio if matches and ratio > 0 else None


def _form_of(logits: Tensor, result: object, before: float) -> HeadForm | None:
    if not isinstance(result, Tensor) or result.shape != logits.shape:
        return None
    scale = _ratio(result, logits)
    if scale is not None:
        return HeadForm(scale * before)
    cap = result.flatten()[-1].item()
    slope = (result.flatten()[0] / logits.flatten()[0]).item()
    scale = 1.0 if abs(slope - 1) < 1e-5 else slope
    if not cap > 0:
        return None
    expected = cap * torch.tanh(scale * logits / cap)
    matches = torch.allclose(result, expected, rtol=1e-5, atol=1e-6)
    return HeadForm(scale * before, cap) if matches else None


class _Output(tuple[Tensor]):
    """The output of a decoder; whatever else a model asks it for is None."""

    def __new__(cls, hidden_BTD: Tensor) -> "_Output":
        return super().__new__(cls, (hidden_BTD,))

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
