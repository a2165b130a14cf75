"""Names of torchtitan's parameters, for checkpoints to move in and out.

torchtitan's Llama 3 rotates neighboring elements of a head where transformers and the models here
rotate halves: the rows of ``wq`` and ``wk`` are in another order. Its Qwen3 rotates halves. Newer
versions renamed projections, head and experts, and may fuse ``wq``, ``wk`` and ``wv``. All
spellings are read, and one of them is written.

Sources: state_dict_adapter.py of torchtitan/models/llama3 and torchtitan/models/qwen3, and
torchtitan/models/common (https://github.com/pytorch/torchtitan, commits 06a7a237, 0310b491).
Not covered: other families, biases, adapters, optimizer states.

Shapes: H heads, K width of a head, G key/value heads, E experts, F their width, D width.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.models import LlamaConfig, ModelConfig, Qwen3Config, RotaryConfig
from fsdptoys.models.huggingface import Bounds, whole
from fsdptoys.utils.text import one_line

from .dcp_folder import DCPFolder
from .safetensors_io import ReadRegion, dtype_name, slices

FAMILIES = ("llama", "qwen3", "qwen3_moe")
VERSIONS = ("0.2", "0.5")
"""Versions of torchtitan with spellings to write."""
NAMES: dict[str, tuple[str, ...]] = {
    "embed_tokens.weight": ("tok_embeddings.weight",),
    "norm.weight": ("norm.weight",),
    "lm_head.weight": ("output.weight", "lm_head.weight"),
    "attn_norm.weight": ("attention_norm.weight",),
    "mlp_norm.weight": ("ffn_norm.weight",),
    "attn.q_proj.weight": (
        "attention.wq.weight",
        "attention.qkv_linear.wq.weight",
    ),
    "attn.k_proj.weight": (
        "attention.wk.weight",
        "attention.qkv_linear.wk.weight",
    ),
    "attn.v_proj.weight": (
        "attention.wv.weight",
        "attention.qkv_linear.wv.weight",
    ),
    "attn.o_proj.weight": ("attention.wo.weight",),
    "attn.q_norm.weight": ("attention.q_norm.weight",),
    "attn.k_norm.weight": ("attention.k_norm.weight",),
    "mlp.gate_proj.weight": ("feed_forward.w1.weight",),
    "mlp.down_proj.weight": ("feed_forward.w2.weight",),
    "mlp.up_proj.weight": ("feed_forward.w3.weight",),
    "mlp.router.weight": ("moe.router.gate.weight",),
}
"""Our name, without the layer → torchtitan's, from the oldest spelling to the newest."""

STACKS = ("moe.experts", "moe.routed_experts.inner_experts")

EXPERTS = {
    part: (f"moe.experts.{kind[:2]}", *(f"{above}.{kind}" for above in STACKS))
    for part, kind in (("gate", "w1_EFD"), ("down", "w2_EDF"), ("up", "w3_EFD"))
}
"""Part of a stack of experts → torchtitan's names."""
EXPERT_BIAS = ("moe.expert_bias", "moe.expert_bias_E")
FUSED = "attention.qkv_linear.wqkv.weight"

IGNORED = re.compile(
    r"(optimizer|lr_scheduler|lr_schedulers|dataloader|train_state|ft_dataloader)(\..*)?"
    r"|freqs_cis|rope_cache|(.*\.)?tokens_per_expert(_E)?|(.*\.)?rope\.cache"
)
"""Items of such checkpoints that are no weights."""


@dataclass(frozen=True)
class TitanTensor:
    """A tensor of torchtitan that equals a region of a parameter, but for the order of rows."""

    names: tuple[str, ...]
    """Spellings; ``name`` is that of a version."""
    shape: tuple[int, ...]
    param: str
    """Our name."""
    region: Bounds
    """Of the parameter."""
    turned_heads: int = 0
    """Heads that rotate neighbors; 0 if rows are in our order."""

    def name(self, version: str) -> str:
        """The spelling of a version."""
        return self.names[0 if version == VERSIONS[0] else -1]

    def to_ours(self, tensor: Tensor) -> Tensor:
        """Put rows (H·K) into our order: the first of all pairs, then the second."""
        heads = self.turned_heads
        return _turn(tensor, (heads, -1, 2)) if heads else tensor

    def to_theirs(self, tensor: Tensor) -> Tensor:
        """Put rows (H·K) into torchtitan's order: pair after pair."""
        heads = self.turned_heads
        return _turn(tensor, (heads, 2, -1)) if heads else tensor


def _turn(tensor: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """Swap the last two of three dims into which rows are split."""
    return tensor.unflatten(0, sizes).transpose(1, 2).reshape(tensor.shape)


def titan_tensors(config: ModelConfig) -> list[TitanTensor]:
    """Tensors of torchtitan's model of the same shape.

    Raises:
        ConfigError: for a family or a setting without a counterpart.
    """
    heads = _check_family(config)
    with torch.device("meta"):
        model = config.build()
    tensors: list[TitanTensor] = []
    for name, param in model.named_parameters():
        shape = tuple(param.shape)
        block = re.match(r"layers\.\d+\.", name)
        prefix = block[0] if block else ""
        kind = name.removeprefix(prefix)
        if kind.startswith("mlp.experts."):
            tensors += _expert_tensors(name, prefix, shape)
            continue
        names = tuple(prefix + spelling for spelling in NAMES[kind])
        tensors.append(
            TitanTensor(names, shape, name, whole(shape), heads.get(kind, 0))
        )
    if config.tie_embeddings:
        shape = tuple(model.embed_tokens.weight.shape)
        names = NAMES["lm_head.weight"]
        tensors.append(TitanTensor(names, shape, "embed_tokens.weight", whole(shape)))
    return tensors


def titan_biases(config: ModelConfig, version: str) -> dict[str, tuple[int, ...]]:
    """Return the biases of routers, by name: zero, and read by torchtitan where it balances by
    them."""
    bias = EXPERT_BIAS[VERSIONS.index(version)]
    return {
        tensor.param.replace("mlp.router.weight", bias): tensor.shape[:1]
        for tensor in titan_tensors(config)
        if tensor.param.endswith("mlp.router.weight")
    }


def _check_family(config: ModelConfig) -> dict[str, int]:
    """Return projection → heads that torchtitan's model rotates by neighbors."""
    if config.family == "llama":
        assert isinstance(config, LlamaConfig)
        for key in ("attention_bias", "mlp_bias"):
            if getattr(config, key):
                raise ConfigError(
                    f"model.{key}=true has no counterpart in torchtitan's Llama 3; use "
                    "fsdptoys convert to-hf"
                )
        return {
            "attn.q_proj.weight": config.n_heads,
            "attn.k_proj.weight": config.n_kv_heads,
        }
    if isinstance(config, Qwen3Config):
        return {}
    raise ConfigError(
        f"model={config.name} is of the family {config.family}, and torchtitan's names are known "
        f"for {', '.join(FAMILIES)}; use fsdptoys convert to-hf"
    )


def _expert_tensors(
    name: str, prefix: str, shape: tuple[int, ...]
) -> Iterator[TitanTensor]:
    parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
    rows = shape[1] // len(parts)
    for index, part in enumerate(parts):
        region = ((0, shape[0]), (index * rows, (index + 1) * rows), (0, shape[2]))
        names = tuple(prefix + spelling for spelling in EXPERTS[part])
        yield TitanTensor(names, (shape[0], rows, shape[2]), name, region)


class TitanWeights:
    """A model's parameters in a checkpoint of torchtitan, read one at a time.

    Raises:
        ConfigError: if tensors are missing, have other shapes or dtypes, or have no place in the
            model.
    """

    def __init__(self, folder: DCPFolder, config: ModelConfig) -> None:
        self.config = config
        self.folder = folder
        stored = folder.tensors
        embedding = "tok_embeddings.weight"
        self._prefix = "model." if f"model.{embedding}" in stored else ""
        owner = f"a {config.family} model as configured"
        self._tensors: dict[str, list[TitanTensor]] = {}
        placed = set()
        self._head: str | None = None
        for tensor in titan_tensors(config):
            name = self._stored_name(tensor)
            is_tied = tensor.names == NAMES["lm_head.weight"] and config.tie_embeddings
            if is_tied and name not in stored:
                continue
            folder.require(name, self._stored_shape(tensor, name), owner)
            placed.add(name)
            if is_tied:
                self._head = name
            else:
                self._tensors.setdefault(tensor.param, []).append(tensor)
        for name in stored.keys() - placed:
            self._check_other(name, owner)
        # A stack's experts are requested one by one, alternating between gate, up and down.
        self._load_cached = functools.lru_cache(maxsize=3)(self._load)

    def read(self, name: str, region: Bounds) -> Tensor:
        """Return a part of a parameter."""
        return self._load_cached(name)[slices(region)]

    def check_values(self) -> None:
        """Reject a head with other values than the embedding that it is tied to, and biases of
        routers."""
        if self._head is not None:
            shape = self.folder.tensors[self._head].shape
            embedding = self.read("embed_tokens.weight", whole(shape))
            if not torch.equal(self.folder.load(self._head), embedding):
                raise ConfigError(
                    f"{self.folder.path} holds {self._head} with other values than the embedding, "
                    "and model.tie_embeddings=true; set model.tie_embeddings=false"
                )
        for name, stored in self.folder.tensors.items():
            if name.endswith(EXPERT_BIAS):
                self.folder.require(name, stored.shape, "a router")
                if self.folder.load(name).any():
                    raise ConfigError(
                        f"{self.folder.path} holds {name}, which changes the choice of experts, "
                        "and routers here have no such bias; train with load_balance_coeff=None"
                    )

    def _stored_name(self, tensor: TitanTensor) -> str:
        """The spelling that the folder has, the first one if it has none."""
        names = [self._prefix + name for name in tensor.names]
        kind = _fused_part(tensor.param)
        if kind:
            names.append(f"{self._prefix}{tensor.param.removesuffix(kind)}{FUSED}")
        return next((name for name in names if name in self.folder.tensors), names[0])

    def _stored_shape(self, tensor: TitanTensor, name: str) -> tuple[int, ...]:
        if not name.endswith(FUSED):
            return tensor.shape
        config = self.config
        assert isinstance(config, RotaryConfig)
        heads = config.n_heads + 2 * config.n_kv_heads
        return (heads * config.head_width, config.dim)

    def _load(self, name: str) -> Tensor:
        parts = self._tensors[name]
        loaded = [tensor.to_ours(self._load_part(tensor)) for tensor in parts]
        if len(parts) == 1:
            return loaded[0]
        sizes = [
            max(last for _, last in dim)
            for dim in zip(*(t.region for t in parts), strict=True)
        ]
        full = torch.empty(sizes, dtype=loaded[0].dtype)
        for tensor, part in zip(parts, loaded, strict=True):
            full[slices(tensor.region)] = part
        return full

    def _load_part(self, tensor: TitanTensor) -> Tensor:
        name = self._stored_name(tensor)
        stored = self.folder.load(name)
        if not name.endswith(FUSED):
            return stored
        config = self.config
        assert isinstance(config, RotaryConfig)
        shared = config.n_heads // config.n_kv_heads
        # (G, queries of a key and value head, its key, its value, K, D)
        fused = stored.unflatten(0, (config.n_kv_heads, shared + 2, config.head_width))
        rows = {
            "attn.q_proj.weight": slice(0, shared),
            "attn.k_proj.weight": slice(shared, shared + 1),
            "attn.v_proj.weight": slice(shared + 1, shared + 2),
        }[_fused_part(tensor.param)]
        return fused[:, rows].reshape(tensor.shape)

    def _check_other(self, name: str, owner: str) -> None:
        """Reject a tensor that the model has no place for."""
        own = name.removeprefix(self._prefix)
        if (
            IGNORED.fullmatch(name)
            or IGNORED.fullmatch(own)
            or own.endswith(EXPERT_BIAS)
        ):
            return
        raise ConfigError(
            f"{self.folder.path} holds {one_line(name)}, for which {owner} has no place; name "
            "another model, as model=qwen3_8b"
        )


def _fused_part(param: str) -> str:
    """The end of the name of a projection that may be fused; empty for others."""
    block = re.fullmatch(r"layers\.\d+\.(attn\.[qkv]_proj\.weight)", param)
    return block[1] if block else ""


def read_titan_tensor(
    tensor: TitanTensor, read: ReadRegion, dtype: torch.dtype
) -> Tensor:
    """Return torchtitan's tensor from a model's parameters; ConfigError if a value overflows."""
    source = read(tensor.param, tensor.region).reshape(tensor.shape)
    converted = tensor.to_theirs(source).to(dtype)
    if converted.isinf().any() and not source.isinf().any():
        raise ConfigError(
            f"{tensor.param} holds {source.abs().max():g}, too large for {dtype_name(dtype)}; set "
            "dtype=bfloat16 or dtype=float32"
        )
    return converted
