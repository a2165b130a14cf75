"""Register own models, data, optimizers, losses, strategies, metrics writers and callbacks.

    @fsdptoys.register.optimizer("lion")
    class LionConfig(OptimConfig):
        momentum: float = 0.9  # optim.momentum

A registered class is chosen and configured like a built-in one (``optim=lion optim.momentum=0.8``):
its fields are options. The decorators only fill tables; ``registry`` joins a table with the
built-in classes of its group. Code is registered by modules that ``fsdptoys.imports`` loads, never
by a file that is read. Nothing here imports torch.
"""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .errors import ConfigError

CONFIGS = Path(__file__).parent / "configs"
if not CONFIGS.is_dir():  # a link that was unpacked as a text file
    CONFIGS = Path(__file__).parents[1] / "configs"

WORDS = ("null", "true", "false", "none", "default", "yes", "no", "on", "off")
"""Names that the command line reads as something else."""

OWN = "own"
"""Metadata of a field that is declared without ``option``: any change of it may change losses."""

T = TypeVar("T")
R = TypeVar("R")


class Kind(NamedTuple):
    """What can be registered."""

    noun: str
    group: str
    """Group of the configuration, the word before ``=``."""
    package: str
    base: str
    """Name of the class in ``package`` that own ones derive from."""
    name_field: str = "name"
    """Class variable that gets the registered name."""


KINDS = {
    kind.noun: kind
    for kind in (
        Kind("model", "model", "fsdptoys.models", "ModelConfig", "family"),
        Kind("data", "data", "fsdptoys.data", "DataConfig"),
        Kind("optimizer", "optim", "fsdptoys.optim", "OptimConfig"),
        Kind("loss", "loss", "fsdptoys.loss", "LossConfig"),
        Kind("strategy", "parallel", "fsdptoys.parallel", "ParallelConfig"),
        Kind("writer", "writers", "fsdptoys.metrics", "WriterConfig"),
        Kind("callback", "callbacks", "fsdptoys.train", "CallbackConfig"),
    )
}
"""Name of the decorator → kind."""

_classes: dict[str, dict[str, type[Any]]] = {kind.group: {} for kind in KINDS.values()}
_builtin: dict[str, Mapping[str, type[Any]]] = {}
_clear_functions: list[Callable[[], None]] = []


def model(name: str) -> Callable[[type[T]], type[T]]:
    """Register a ``ModelConfig`` as ``model=name``; the name is also that of its family."""
    return _decorator(KINDS["model"], name)


def data(name: str) -> Callable[[type[T]], type[T]]:
    """Register a ``DataConfig`` as ``data=name``."""
    return _decorator(KINDS["data"], name)


def optimizer(name: str) -> Callable[[type[T]], type[T]]:
    """Register an ``OptimConfig`` as ``optim=name``."""
    return _decorator(KINDS["optimizer"], name)


def loss(name: str) -> Callable[[type[T]], type[T]]:
    """Register a ``LossConfig`` as ``loss=name``."""
    return _decorator(KINDS["loss"], name)


def strategy(name: str) -> Callable[[type[T]], type[T]]:
    """Register a ``ParallelConfig`` as ``parallel=name``."""
    return _decorator(KINDS["strategy"], name)


def writer(name: str) -> Callable[[type[T]], type[T]]:
    """Register a ``WriterConfig`` as an element of ``metrics.writers``."""
    return _decorator(KINDS["writer"], name)


def callback(name: str) -> Callable[[type[T]], type[T]]:
    """Register a ``CallbackConfig`` as an element of ``train.callbacks``."""
    return _decorator(KINDS["callback"], name)


def registered(group: str) -> Mapping[str, type[Any]]:
    """Return name → class of the registered ones of a group; the mapping is live."""
    return types.MappingProxyType(_classes.get(group, {}))


def registry(group: str, builtin: dict[str, type[T]]) -> Mapping[str, type[T]]:
    """Return the built-in classes of a group, followed by the registered ones as soon as they
    are."""
    _builtin[group] = builtin
    return types.MappingProxyType(ChainMap(_classes[group], builtin))


def live_cache(function: Callable[..., R]) -> "functools._lru_cache_wrapper[R]":
    """Cache like ``functools.cache`` until another class is registered."""
    cached = functools.cache(function)
    _clear_functions.append(cached.cache_clear)
    return cached


def snapshot() -> Callable[[], None]:
    """Return a function that forgets what is registered from now on."""
    tables = {group: dict(table) for group, table in _classes.items()}

    def restore() -> None:
        for group, table in tables.items():
            _classes[group].clear()
            _classes[group].update(table)
        _clear_caches()

    return restore


def _clear_caches() -> None:
    for clear in _clear_functions:
        clear()


def _decorator(kind: Kind, name: str) -> Callable[[type[T]], type[T]]:
    def register(cls: type[T]) -> type[T]:
        call = f'register.{kind.noun}("{name}")'
        if not isinstance(cls, type):
            raise ConfigError(
                f"{call} takes a class, not {cls!r}; write it above a class that derives from "
                f"{kind.base} of {kind.package}"
            )
        _check_base(kind, call, cls)
        _check_name(kind, call, name, cls)
        # Before the class is made a dataclass, which would take the name for a field
        if kind.name_field in inspect.get_annotations(cls):
            raise ConfigError(
                f"{cls.__name__}.{kind.name_field} is set by {call}; leave the field out"
            )
        setattr(cls, kind.name_field, name)
        _make_dataclass(cls)
        _check_fields(cls)
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if missing:
            raise ConfigError(
                f"{cls.__name__} lacks {', '.join(missing)}, which every {kind.base} has; define "
                f"{'it' if len(missing) == 1 else 'them'} as {kind.base} describes"
            )
        _classes[kind.group][name] = cls
        _clear_caches()
        return cls

    return register


def _check_base(kind: Kind, call: str, cls: type) -> None:
    bases = {
        base.__name__
        for base in cls.__mro__[1:]
        if f"{base.__module__}.".startswith(f"{kind.package}.")
    }
    if kind.base not in bases:
        raise ConfigError(
            f"{call} needs a class that derives from {kind.base} of {kind.package}, which "
            f"{cls.__name__} does not; write class {cls.__name__}({kind.base})"
        )


def _check_name(kind: Kind, call: str, name: str, cls: type) -> None:
    is_word = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", name)
    if not is_word or name in WORDS or name.startswith("base_"):
        raise ConfigError(
            f"{call} needs a name of small letters, digits and underscores that begins with a "
            "letter and is no word such as null or default; use another one"
        )
    old = _classes[kind.group].get(name)
    # A cell of a notebook that runs again defines its class again
    is_repeat = old is not None and (
        old.__module__ == cls.__module__ == "__main__"
        and old.__qualname__ == cls.__qualname__
    )
    is_file = (CONFIGS / kind.group / f"{name}.yaml").is_file()
    owner = (
        f"class {old.__qualname__} of {old.__module__}"
        if old is not None and not is_repeat
        else "a built-in one"
        if is_file or name in _builtin.get(kind.group, {})
        else None
    )
    if owner is not None:
        raise ConfigError(
            f"{call} takes a name that {owner} has; use another one than {name}"
        )


def _make_dataclass(cls: type) -> None:
    """Apply ``@dataclass`` unless it has been applied."""
    annotations = inspect.get_annotations(cls)
    for base in filter(dataclasses.is_dataclass, cls.__mro__[1:]):
        for name in (field.name for field in dataclasses.fields(base)):
            value = cls.__dict__.get(name, dataclasses.MISSING)
            if name in annotations or value is dataclasses.MISSING:
                continue
            if not callable(value) and not isinstance(value, property):
                raise ConfigError(
                    f"{cls.__name__}.{name}={value!r} has no type, and would not change the "
                    f"option's default; write {name}: {type(value).__name__} = {value!r}"
                )
    if "__dataclass_fields__" not in cls.__dict__:
        try:
            dataclasses.dataclass(cls)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{cls.__name__} cannot be a dataclass ({error}); give each field a type and a "
                "default"
            ) from error


def own_fields(cls: type) -> Iterator["dataclasses.Field[Any]"]:
    """The fields that a class declares itself, inherits from a class of own code, or
    overrides."""
    builtin = [base for base in cls.__mro__ if base.__module__.startswith("fsdptoys.")]
    for field in dataclasses.fields(cls):
        owners = (base.__dict__.get("__dataclass_fields__", {}) for base in builtin)
        if not any(owner.get(field.name) is field for owner in owners):
            yield field


def _check_fields(cls: type) -> None:
    """Check types and defaults of the options, and declare those that are plain fields."""
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise ConfigError(
            f"{cls.__name__} has a field with a type that cannot be read ({error}); name types "
            "that its module imports"
        ) from error
    for field in own_fields(cls):
        _check_field(f"{cls.__name__}.{field.name}", field, hints[field.name])
        if "option" not in field.metadata:
            field.metadata = types.MappingProxyType(
                {OWN: True} | _overridden(cls, field.name) | dict(field.metadata)
            )


def _overridden(cls: type, name: str) -> dict[Any, Any]:
    """The metadata of the field that a plain one replaces: its bounds and declaration."""
    for base in cls.__mro__[1:]:
        if name in (fields := base.__dict__.get("__dataclass_fields__", {})):
            return dict(fields[name].metadata)
    return {}


def _check_field(key: str, field: "dataclasses.Field[Any]", annotation: Any) -> None:
    if not _is_option_type(annotation):
        raise ConfigError(
            f"{key} has the type {inspect.formatannotation(annotation)}, which no option can "
            "have; use bool, int, float, str, an Enum, a list of numbers or text, or one of "
            "these or None"
        )
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        default = field.default
    else:
        raise ConfigError(f"{key} has no default, which every option has; give it one")
    if not _fits(default, annotation):
        raise ConfigError(
            f"{key} has the default {default!r}, which is no "
            f"{inspect.formatannotation(annotation)}; correct the type or the default"
        )


def _is_option_type(annotation: Any) -> bool:
    """Whether OmegaConf and the command line take values of this type."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        others = [kind for kind in arguments if kind is not type(None)]
        return len(others) == 1 < len(arguments) and _is_option_type(others[0])
    if origin is list:
        return arguments[0] in (int, float, str)
    return annotation in (bool, int, float, str) or (
        isinstance(annotation, type) and issubclass(annotation, Enum)
    )


def _fits(value: Any, annotation: Any) -> bool:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is list:
        return isinstance(value, list) and all(
            _fits(item, arguments[0]) for item in value
        )
    if arguments:
        return any(_fits(value, kind) for kind in arguments)
    if annotation is float:
        return type(value) in (int, float)
    return type(value) is annotation
