"""Wrap policies: which modules of a model become units, for every strategy that shards parameters
and for the planner.

A unit gathers its parameters before its forward and frees them after it. Three ways to choose:

- by position (``parallel.wrap``): each block, or also its attention and feed-forward; embedding and
  head are units too;
- by class (``parallel.wrap_classes``), as PyTorch's ``ModuleWrapPolicy``: every instance of the
  classes;
- by size (``parallel.min_params``), as PyTorch's ``size_based_auto_wrap_policy``: from the leaves
  up, a module becomes a unit if it has that many parameters outside the units within it.

The root holds all other parameters, from its forward to the end of the backward. By class and by
size the embedding and the head are units only if chosen, as in PyTorch.

Never a unit: a module without a forward of its own (``ModuleList``); a part of
``MultiheadAttention``, which does not call it; a module with some but not all names of a shared
weight, which two units would gather and reduce; by class also a module without parameters outside
the units within it. Not covered: a user's module must not be chosen if its parent reads its weight
without calling it.

Source: ``torch/distributed/fsdp/wrap.py`` (torch 2.13), ``_recursive_wrap`` and the policies there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.models.moe import Experts
from fsdptoys.utils.text import near_miss, value_text

UnitParams = tuple[nn.Module, list[nn.Parameter]]
"""A module, and the parameters that its forward is the first to need."""

LEAVES = (nn.MultiheadAttention,)
"""Modules whose children's forwards do not run."""


@dataclass(frozen=True)
class Unit:
    """Modules that share one all-gather."""

    modules: tuple[str, ...]
    """Names in the order of the forward; a unit that is flattened has one."""
    embeds: bool
    """Whether it has only lookup tables, whose gradient needs no weights."""
    ends_forward: bool
    """Whether it has the head, which the backward needs first."""
    float32: bool = False
    """Whether it computes with float32 parameters whatever ``parallel.param_dtype`` says."""


def position_units(
    model: DecoderModel, parts: Sequence[str], groups: bool
) -> list[Unit]:
    """Embedding, blocks, parts of blocks and head.

    Args:
        parts: modules of a block that are units inside the block's.
        groups: whether a unit may have several modules: norm and head then share one, with the
            embedding if tied.
    """
    head = model.head_names if groups else model.head_names[-1:]
    embedding = tuple(
        name for name in model.embedding_names if _has_parameters(model, name)
    )
    has_head = bool(head) and _has_parameters(model, head[-1])
    blocks = [
        f"{model.blocks_name}.{index}" for index, _ in model.layers.named_children()
    ]
    inner: list[tuple[str, ...]] = [
        (name,)
        for block in blocks
        for name in (block, *(f"{block}.{part}" for part in parts))
    ]
    if has_head and shares_head(model):
        inner = [(*embedding, *head), *inner] if groups and embedding else inner
    else:
        inner = [embedding] * bool(embedding) + inner + [head] * has_head
    return [_unit(model, names) for names in inner]


def _has_parameters(model: DecoderModel, name: str) -> bool:
    """Whether a rank has the module of this name, with parameters."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return False
    return next(module.parameters(), None) is not None


def shares_head(model: DecoderModel) -> bool:
    """Whether the head's weight is that of another module as well."""
    head = model.get_submodule(model.head_names[-1])
    owners = {
        module
        for module in model.modules()
        if any(param is head.weight for param in module._parameters.values())
    }
    return len(owners) > 1


def class_units(model: DecoderModel, classes: Sequence[str]) -> list[Unit]:
    """Every module of these classes or of classes derived from them.

    Raises:
        ConfigError: for a class that no unit can have.
    """
    able = _able(model)
    class_names = sorted({type(module).__name__ for module in able.values()})
    accepted = set().union(*map(_class_names, able.values()))
    unknown = [name for name in classes if name not in accepted]
    if unknown:
        matches = [
            name if name in accepted else near_miss(name, class_names)
            for name in classes
        ]
        fixed = list(dict.fromkeys(filter(None, matches))) or [
            type(model.layers[0]).__name__
        ]
        raise ConfigError(
            f"parallel.wrap_classes={value_text(list(classes))} names {unknown[0]}, but units of "
            f"this model can be of the classes {', '.join(class_names)}; set "
            f"parallel.wrap_classes={value_text(fixed)}"
        )
    chosen = {
        name: module
        for name, module in able.items()
        if set(classes) & _class_names(module)
    }
    owned = own_parameters([[module] for module in chosen.values()])
    return [
        _unit(model, (name,))
        for name, params in zip(chosen, owned, strict=True)
        if params
    ]


def size_units(model: DecoderModel, least: float) -> list[Unit]:
    """Modules with at least ``least`` parameters outside the units within them."""
    able = _able(model)
    chosen = set()

    def wrap(name: str, module: nn.Module) -> int:
        """Elements in units, after choosing them."""
        elements = sum(param.numel() for param in module.parameters())
        if elements < least:
            return 0
        inner = sum(
            wrap(child, model.get_submodule(child)) for child in _children(name, module)
        )
        if name in able and elements - inner >= least:
            chosen.add(name)
            return elements
        return inner

    wrap("", model)
    return [_unit(model, (name,)) for name in able if name in chosen]


def split_off_experts(model: DecoderModel, units: Sequence[Unit]) -> list[Unit]:
    """Make the stacks of each layer's experts units of their own, in the order of the forward."""
    names = [name for name, _ in _walk("", model)]
    unit_names = {name for unit in units for name in unit.modules}
    experts = [
        name
        for name in names
        if isinstance(model.get_submodule(name), Experts) and name not in unit_names
    ]
    return sorted(
        [*units, *(_unit(model, (name,)) for name in experts)],
        key=lambda unit: names.index(unit.modules[0]),
    )


def split_off_float32(model: DecoderModel, units: Sequence[Unit]) -> list[Unit]:
    """Make the modules that compute in float32 units of their own, in the order of the forward."""
    names = [name for name, _ in _walk("", model)]
    float32_names = model.float32_modules
    others = [unit for unit in units if set(unit.modules).isdisjoint(float32_names)]
    inner = [
        Unit((name,), embeds=False, ends_forward=False, float32=True)
        for name in float32_names
    ]
    return sorted([*others, *inner], key=lambda unit: names.index(unit.modules[0]))


def check_float32_modules(model: DecoderModel, strategy: str, dtype: str) -> None:
    """Check that the modules that compute in float32 contain no others.

    Raises:
        ConfigError: naming one that does, which no unit of one dtype can have.
    """
    float32_names = set(model.float32_modules)
    for name in model.float32_modules:
        for path, _ in model.get_submodule(name).named_parameters(prefix=name):
            if path.rpartition(".")[0] not in float32_names:
                raise ConfigError(
                    f"parallel.param_dtype={dtype} keeps parameters of {name} in float32 beside "
                    f"others, which units of parallel={strategy} cannot; set parallel=ddp or "
                    "parallel.param_dtype=float32"
                )


def own_parameters(modules: list[list[nn.Module]]) -> list[list[nn.Parameter]]:
    """Parameters of each group of modules that no later group has; outer modules must come before
    inner ones."""
    inner_params: set[nn.Parameter] = set()
    owned: list[list[nn.Parameter]] = []
    for group in reversed(modules):
        params = [param for module in group for param in module.parameters()]
        owned.append(
            [param for param in dict.fromkeys(params) if param not in inner_params]
        )
        inner_params.update(params)
    return owned[::-1]


def inside_out(names: Sequence[str]) -> list[str]:
    """Names of modules in the order of the forward, sorted by the ends of their forwards: inner
    modules come first."""

    def forward_end(name: str) -> tuple[int, int]:
        prefix = f"{name}." if name else ""
        return max(
            i for i, other in enumerate(names) if f"{other}.".startswith(prefix)
        ), -len(prefix)

    return sorted(names, key=forward_end)


def _unit(model: DecoderModel, names: tuple[str, ...]) -> Unit:
    embeds = all(isinstance(model.get_submodule(name), nn.Embedding) for name in names)
    head = model.head_names[-1:]
    ends_forward = any(f"{name}.".startswith(f"{head[0]}.") for name in names if head)
    return Unit(names, embeds, ends_forward)


def _able(model: DecoderModel) -> dict[str, nn.Module]:
    """Modules that can be units, by name, in the order of their forwards."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(param, []).append(name)
    shared = [names for names in aliases.values() if len(names) > 1]

    def splits(module: str) -> bool:
        return any(
            0 < sum(name.startswith(f"{module}.") for name in names) < len(names)
            for names in shared
        )

    return {
        name: module
        for name, module in _walk("", model)
        if name
        and type(module).forward is not nn.Module.forward
        and next(module.parameters(), None) is not None
        and not splits(name)
    }


def _walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    for child in _children(name, module):
        yield from _walk(child, module.get_submodule(child.rpartition(".")[2]))


def _children(name: str, module: nn.Module) -> list[str]:
    """Names of the direct children in the order of their forwards: ``forward_order``, then as
    registered."""
    if isinstance(module, LEAVES):
        return []
    names = dict.fromkeys(
        [
            *getattr(module, "forward_order", ()),
            *(child for child, _ in module.named_children()),
        ]
    )
    return [f"{name}.{child}" if name else child for child in names]


def _class_names(module: nn.Module) -> set[str]:
    """Names of a module's class and of those that it derives from, except ``Module``."""
    kinds = type(module).__mro__
    return {kind.__name__ for kind in kinds[: kinds.index(nn.Module)]}
