"""Checks of a model of transformers when it is built, on the meta device and without weights.

Silent errors exist: a logit scale that a loss ignores, parameters that nothing initializes, a
module whose parameters no strategy sees. Each is found here, and named in one sentence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .base import TransformersBase, TransformersSettings
from .buffers import undefined_buffers

FINAL_NORMS = ("norm", "norm_f", "ln_f", "final_layer_norm", "final_layernorm")
RESERVED = frozenset({"hf", "decoder", "config", "context", "lm_head"})
"""Attributes of the adapter, which a child of a decoder must not replace."""


@dataclass(frozen=True)
class Parts:
    """Modules of a model, found by identity and class rather than by name."""

    decoder: Any
    """The parent of the list of blocks."""
    embedding: nn.Module
    blocks: nn.ModuleList
    norm: nn.Module | None
    """Normalization after the blocks; None if there is none."""
    head: Any
    """The output projection, a plain linear layer."""
    names_of_block_parts: tuple[str, ...]
    """Children of every block that have children with parameters: attention and feed-forward."""


def find_parts(hf: Any) -> Parts:
    """Find the parts of a model.

    Raises:
        ValueError: if it is built otherwise than a list of blocks between embedding and head.
    """
    name = type(hf).__name__
    kinds = set(hf._no_split_modules or ())
    lists = [
        (path, module)
        for path, module in hf.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(type(block).__name__ in kinds for block in module)
    ]
    if len(lists) != 1:
        paths = ", ".join(path for path, _ in lists) or "none"
        raise ValueError(
            f"{name} has not one list of blocks ({paths} by its _no_split_modules), which every "
            "strategy needs; train another model"
        )
    path, blocks = lists[0]
    decoder = hf.get_submodule(path.rpartition(".")[0])
    children = dict(decoder.named_children())
    embedding = hf.get_input_embeddings()
    if embedding not in children.values():
        raise ValueError(
            f"{name} has its embedding elsewhere than beside its blocks; train another model"
        )
    head = hf.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(
            f"{name} has a head of the class {type(head).__name__}, and losses are computed for "
            "plain linear layers only; train another model"
        )
    return Parts(
        decoder,
        embedding,
        blocks,
        _norm_after(children, blocks),
        head,
        _block_parts(blocks),
    )


def check_parts(
    model: TransformersBase, children_of_decoder: Mapping[str, str], hf: Any
) -> None:
    """Check that the adapter has every parameter of the model.

    Args:
        model: the adapter.
        children_of_decoder: names of its children that are the decoder's.
        hf: the model of transformers.

    Raises:
        ValueError: naming one that it lacks.
    """
    name = type(hf).__name__
    clash = RESERVED & children_of_decoder.keys()
    own = {id(param) for param in model.parameters()}
    others = [path for path, param in hf.named_parameters() if id(param) not in own]
    if model.decoder._parameters or others or clash:
        raise ValueError(
            f"{name} has parameters outside of embedding, blocks, norm and head "
            f"({', '.join([*model.decoder._parameters, *others, *clash][:3])}); train another model"
        )


def check_model(config: TransformersSettings) -> None:
    """Build a model on the meta device and check it.

    Raises:
        ValueError: with the first problem.
    """
    facts = find_facts(config)
    if config.init_from is None and facts.undefined:
        name, reason = next(iter(facts.undefined.items()))
        raise ValueError(
            f"model.init_from=null draws initial values, and {name} of {facts.class_name} has "
            f"none: {reason}; set model.init_from to a folder with weights"
        )
    if facts.undefined_buffers:
        raise ValueError(
            f"{facts.class_name} has a buffer {facts.undefined_buffers[0]} that transformers "
            "computes only where it constructs a model on a device; train another model"
        )
    if facts.dropout:
        raise ValueError(
            f"{facts.class_name} has a dropout of {facts.dropout} that config.json does not name; "
            "train another model"
        )


@dataclass(frozen=True)
class Facts:
    """What is known of a model only once it is built."""

    class_name: str
    undefined: dict[str, str]
    """Parameters without initial values → why."""
    undefined_buffers: list[str]
    """Buffers that transformers' initialization leaves alone."""
    dropout: float
    """Of a module, after those of the configuration are set to 0."""
    zero_rows: dict[str, list[int]]
    """Rows of lookup tables that are zero and do not train."""


def find_facts(config: TransformersSettings) -> Facts:
    """Build a model on the meta device and look at it; once for each configuration."""
    key = (config.text, config.layers)
    if key not in _FACTS:
        _FACTS[key] = _find_facts(config)
    return _FACTS[key]


_FACTS: dict[tuple[str, int | None], Facts] = {}


def _find_facts(config: TransformersSettings) -> Facts:
    with torch.device("meta"):
        model = config.build()
    initialization = model.initialization()
    dropouts = [
        module.p
        for module in model.modules()
        if isinstance(module, nn.modules.dropout._DropoutNd)
    ]
    return Facts(
        class_name=type(model.hf).__name__,
        undefined=initialization.problems(),
        undefined_buffers=undefined_buffers(model, initialization.written_buffers),
        dropout=max(dropouts, default=0.0),
        zero_rows={
            name: list(rows) for name, rows in initialization.zero_rows().items()
        },
    )


def _norm_after(children: dict[str, Any], blocks: nn.ModuleList) -> nn.Module | None:
    """The final normalization: a child of a usual name, or the last one after the blocks."""

    def is_norm(name: str) -> bool:
        return "norm" in f"{name} {type(children[name]).__name__}".lower()

    names = list(children)
    end = next(index for index, name in enumerate(names) if children[name] is blocks)
    usual = [name for name in FINAL_NORMS if children.get(name) is not None]
    norms = usual or [name for name in names[end + 1 :] if is_norm(name)]
    return children[norms[-1]] if norms else None


def _block_parts(blocks: nn.ModuleList) -> tuple[str, ...]:
    """Names of the children that all blocks have, with parameters in children of their own."""
    shared: dict[str, None] | None = None
    for block in blocks:
        names = dict.fromkeys(
            name
            for name, child in block.named_children()
            if any("." in path for path, _ in child.named_parameters())
            and type(child).forward is not nn.Module.forward
        )
        shared = (
            names
            if shared is None
            else {name: None for name in shared if name in names}
        )
    return tuple(shared or ())
