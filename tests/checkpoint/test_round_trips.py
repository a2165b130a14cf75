"""Folders in Hugging Face format: round trips, weights to start from, and the shards that a rank
reads of them."""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdptoys.checkpoint import (
    HuggingFaceFolder,
    RunWeights,
    open_init_from,
    save_weights,
    verify_checksums,
)
from fsdptoys.cli.convert import training_command
from fsdptoys.cli.main import main
from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.models import GPT2Config, LlamaConfig, ModelConfig, whole
from fsdptoys.models.rotary import RopeScaling
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
    World,
)
from fsdptoys.parallel.mesh import MeshConfig
from tests.checkpoint.damages import (
    CONFIG,
    GPT2,
    SENTENCES,
    THIRD,
    edit_bytes,
    make_folder,
)
from tests.harness.families import CONVERTIBLE, SMALL
from tests.harness.folders import build, build_empty, load, write
from tests.harness.process_memory import NEEDS_PEAK, peak_growth_bytes
from tests.harness.ranks import run_ranks
from tests.harness.saved_runs import FILE_BYTES, write_config
from tests.harness.transformers_oracle import import_transformers

TOKENS_BT = torch.arange(2 * 33).view(2, 33) % 96


def named_like(config: ModelConfig, other: ModelConfig) -> ModelConfig:
    """With the fields that ``config.json`` does not hold."""
    return dataclasses.replace(config, name=other.name)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.oracle
@pytest.mark.parametrize("case", CONVERTIBLE)
def test_transformers_loads_our_folders(case: str, tmp_path: Path) -> None:
    """Oracle: transformers' from_pretrained on a sharded folder of ours: no key left over, logits
    to 1e-5."""
    transformers = import_transformers()
    model = build(SMALL[case])
    written = write(tmp_path / "ours", model, max_file_bytes=FILE_BYTES)
    assert len(written.files) > 2

    oracle, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values()), info
    assert type(oracle).__name__ == model.config.hugging_face.architecture
    assert oracle.dtype == torch.float32
    torch.testing.assert_close(
        model(TOKENS_BT),
        oracle(TOKENS_BT, use_cache=False).logits,
        rtol=1e-5,
        atol=1e-5,
    )
    # The settings are equal after transformers has read and written them, without token ids.
    oracle.save_pretrained(tmp_path / "theirs")
    assert (
        named_like(HuggingFaceFolder(tmp_path / "theirs").model_config(), model.config)
        == model.config
    )
    assert (
        oracle.generation_config.eos_token_id is None
        and oracle.config.bos_token_id is None
    )


@pytest.mark.parametrize("case", CONVERTIBLE)
@pytest.mark.parametrize("file_bytes", [2**31, FILE_BYTES])
def test_our_folders_round_trip_bitwise(
    case: str, file_bytes: int, tmp_path: Path
) -> None:
    """Oracle: the parameters before saving; a second save writes identical files."""
    model = build(SMALL[case])
    write(tmp_path / "first", model, max_file_bytes=file_bytes)
    again = load(tmp_path / "first")
    assert named_like(again.config, model.config) == model.config
    for (name, param), other in zip(
        model.named_parameters(), again.parameters(), strict=True
    ):
        assert torch.equal(param, other), name

    write(tmp_path / "second", again, max_file_bytes=file_bytes)
    contents = [
        {file.name: file.read_bytes() for file in (tmp_path / f).iterdir()}
        for f in ("first", "second")
    ]
    assert contents[0] == contents[1]
    assert verify_checksums(tmp_path / "first") == len(contents[0]) - 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_converted_on_saving_and_loading(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Oracle: PyTorch's own conversion, on saving and on loading, into any dtype of the
    parameter."""
    model = build(SMALL["gpt2"])
    write(tmp_path / "folder", model, dtype)
    assert (
        json.loads((tmp_path / "folder" / "config.json").read_text())["torch_dtype"]
        == str(dtype)[6:]
    )
    source = HuggingFaceFolder(tmp_path / "folder")
    source.check(model)
    for param_dtype in (torch.float32, torch.bfloat16):
        for name, param in model.named_parameters():
            filled = torch.full_like(param, torch.nan, dtype=param_dtype)
            source.fill(filled, name)
            assert torch.equal(filled, param.detach().to(dtype).to(param_dtype)), name


def test_names_may_lack_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    """Oracle: the folder with full names; the published GPT-2 has names like these, and masks that
    nothing needs."""
    model = build(
        GPT2Config(dim=16, n_layers=1, n_heads=2, vocab_size=32, max_seq_len=16)
    )
    write(tmp_path / "folder", model)
    file = tmp_path / "folder" / "model.safetensors"
    bare = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(file).items()
    }
    masks = {
        "h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8),
        "h.0.attn.masked_bias": torch.ones(()),
    }
    save_file(bare | masks, file)
    (tmp_path / "folder" / "checksums.json").unlink()
    for (name, param), other in zip(
        model.named_parameters(), load(tmp_path / "folder").parameters(), strict=True
    ):
        assert torch.equal(param, other), name


def test_stored_head_of_tied_embeddings_must_equal_the_embedding(
    tmp_path: Path,
) -> None:
    """Oracle: the embedding; a head with other values is rejected once values are read."""
    config = LlamaConfig(
        dim=16,
        n_layers=1,
        n_heads=2,
        n_kv_heads=1,
        ffn_dim=24,
        vocab_size=32,
        max_seq_len=16,
        tie_embeddings=True,
    )
    model = build(config)
    write(tmp_path / "folder", model)
    file = tmp_path / "folder" / "model.safetensors"
    (tmp_path / "folder" / "checksums.json").unlink()
    tensors = load_file(file)
    source = HuggingFaceFolder(tmp_path / "folder")
    for factor in (1, 2):
        save_file(
            {
                **tensors,
                "lm_head.weight": tensors["model.embed_tokens.weight"] * factor,
            },
            file,
        )
        source.check(build_empty(config))
        if factor == 1:
            source.check_values()
    with pytest.raises(
        ValueError,
        match=r"holds lm_head.weight with other values than model.embed_tokens.weight",
    ):
        source.check_values()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    make_folder(tmp_path / "weights")
    return tmp_path / "weights"


@pytest.mark.parametrize("row", SENTENCES["weights of other models"], ids=str)
def test_weights_of_another_model_are_refused(
    row: dict[str, Any], tmp_path: Path
) -> None:
    """Oracle: the expected message, for configurations whose weights may even have the same
    shapes."""
    make_folder(tmp_path / "weights")
    make_folder(tmp_path / "gpt2", GPT2)
    (tmp_path / "file").touch()
    changes = {"init_from": "{}/weights"} | row["changes"]
    if "rope_scaling" in changes:
        changes["rope_scaling"] = RopeScaling(**changes["rope_scaling"])
    changes["init_from"] = changes["init_from"].replace("{}", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        open_init_from(dataclasses.replace(CONFIG, **changes).build())
    assert str(refused.value).replace(str(tmp_path), "{}") == row["says"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"name": "x", "init_std": 1.0}, {"max_seq_len": 512}, {"head_dim": 8}],
    ids=str,
)
def test_settings_unrelated_to_weights_may_differ(
    changes: dict[str, Any], weights: Path
) -> None:
    """Oracle: the same weights."""
    model = dataclasses.replace(CONFIG, init_from=str(weights), **changes).build()
    source, written = open_init_from(model), build(CONFIG)
    for name, param in model.named_parameters():
        source.fill(param, name)
        assert torch.equal(param, written.get_parameter(name))


def test_damaged_folder_is_refused_before_workers_start(
    weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: status 2 and the file's name, for one bit that only the checksums know of."""
    edit_bytes(lambda content: content[:-1] + bytes([content[-1] ^ 1]))(weights)
    _, *words = training_command(CONFIG, str(weights))
    assert main([*words, "experiment=null"]) == 2
    assert f"{weights / THIRD} is damaged: its SHA-256 is" in capsys.readouterr().err


def with_odd_sizes(config: ModelConfig) -> ModelConfig:
    """With sizes of which none divides evenly over 4 ranks, and fewer experts than make 2 for
    each."""
    sizes = {
        "dim": 30,
        "n_heads": 3,
        "ffn_dim": 50,
        "vocab_size": 67,
        "max_seq_len": 33,
    }
    sizes |= {
        "n_kv_heads": 1,
        "head_dim": 6,
        "n_experts": 5,
        "expert_ffn_dim": 22,
        "top_k": 1,
    }
    names = {field.name for field in dataclasses.fields(config)}
    return dataclasses.replace(
        config, **{name: size for name, size in sizes.items() if name in names}
    )


def check_shards_of_full_parameters(config: ModelConfig, folder: Path) -> None:
    model = build(config)
    source = HuggingFaceFolder(folder)
    source.check(model)
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts: list[tuple[Any, list[Any]]] = [
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (flat, [Shard(2)]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(0), Shard(1)]),
    ]
    uneven = False
    for name, param in model.named_parameters():
        for mesh, placements in layouts:
            if any(
                isinstance(placement, Shard) and placement.dim >= param.ndim
                for placement in placements
            ):
                continue
            sharded = distribute_tensor(
                torch.full_like(param.detach(), torch.nan), mesh, placements
            )
            source.fill(sharded, name)
            assert torch.equal(sharded.full_tensor(), param), (name, placements)
            uneven |= sharded.to_local().numel() * 4 != param.numel()
    assert uneven


EXTENDED = pytest.mark.extended


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("llama3 scaled tied", marks=EXTENDED),
        pytest.param("qwen3", marks=EXTENDED),
        *("llama4", "qwen3_moe", "gpt2"),
    ],
)
def test_shards_equal_parts_of_the_full_parameters(case: str, tmp_path: Path) -> None:
    """Oracle: the full parameters; sharded along every dim and along two, unevenly, with empty
    shards."""
    config = with_odd_sizes(SMALL[case])
    write(tmp_path, build(config), max_file_bytes=20_000)
    run_ranks(4, check_shards_of_full_parameters, config, tmp_path)


def start_and_save(parallel: ParallelConfig, config: ModelConfig, folder: Path) -> None:
    parallel.resolve(deterministic=False)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    strategy = parallel.build(World(Device("cpu", 0), rank, world_size, MeshConfig()))
    with torch.device("meta"):
        model = config.build()
    source = HuggingFaceFolder(folder / "start")
    source.check(model)
    strategy.shard(model, source.fill)
    for expected in (
        nullcontext(),
        pytest.raises(ConfigError, match="is not empty, and nothing is written over"),
    ):
        if rank > 0:
            assert len(list(strategy.full_parameters())) > 0
        else:
            with expected:
                save_weights(
                    folder / "run" / "weights", strategy.full_parameters(), FILE_BYTES
                )
    torch.distributed.barrier()


@pytest.mark.parametrize("case", ["qwen3_moe", "llama3 scaled tied", "gpt2"])
@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [(SingleConfig(), 1), (DDPConfig(), 2), (FSDP1Config(), 2), (FSDP2Config(), 2)],
    ids=["single", "ddp", "fsdp1", "fsdp2"],
)
def test_every_strategy_saves_the_weights_of_the_folder_that_it_starts_from(
    parallel: ParallelConfig, ranks: int, case: str, tmp_path: Path
) -> None:
    """Oracle: the written parameters; a write error on one rank leaves no other rank waiting."""
    config = with_odd_sizes(SMALL[case])
    model = build(config)
    write(tmp_path / "start", model)
    write_config(tmp_path / "run", config)
    run_ranks(ranks, start_and_save, parallel, config, tmp_path)
    weights = RunWeights(tmp_path / "run")
    assert set(weights.tensors.stored) == {name for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        assert torch.equal(weights.read(name, whole(tuple(param.shape))), param), name


def write_all(configs: dict[Path, ModelConfig]) -> None:
    for folder, config in configs.items():
        write(folder, build(config))


def growth_and_shard_bytes(
    config: ModelConfig, small: Path, folder: Path
) -> tuple[int, int]:
    """How far reading a folder into an FSDP2 model raised the peak of the resident set; its
    shard."""
    context = World(Device("cpu", 0), torch.distributed.get_rank(), 2, MeshConfig())
    parallel = FSDP2Config()
    parallel.resolve(deterministic=False)

    def start(path: Path) -> list[torch.Tensor]:
        source = HuggingFaceFolder(path)
        with torch.device("meta"):
            model = source.model_config().build()
        source.check(model)
        parallel.build(context).shard(model, source.fill)
        return [
            param.to_local()
            for param in model.parameters()
            if isinstance(param, DTensor)
        ]

    start(small)  # triggers lazy imports
    shards: list[torch.Tensor] = []
    growth = peak_growth_bytes(lambda: shards.extend(start(folder)))
    return growth, sum(shard.nbytes for shard in shards)


@NEEDS_PEAK
def test_peak_memory_of_a_rank_is_its_shard_and_one_tensor(tmp_path: Path) -> None:
    """Oracle: Linux's own peak of the resident set: a shard, the file's pages of one parameter, 16
    MiB for all else."""
    small = SMALL["qwen3_moe"]
    sizes = {
        "dim": 256,
        "n_layers": 4,
        "ffn_dim": 512,
        "vocab_size": 3000,
        "n_experts": 16,
    }
    big = dataclasses.replace(small, **sizes, expert_ffn_dim=448)
    # In a child process, because the ranks would otherwise inherit freed memory to reuse.
    run_ranks(1, write_all, {tmp_path / "small": small, tmp_path / "folder": big})
    with torch.device("meta"):
        nbytes = [param.nbytes for param in big.build().parameters()]
    assert sum(nbytes) > 80 * 2**20
    for growth, shard_bytes in run_ranks(
        2, growth_and_shard_bytes, big, tmp_path / "small", tmp_path / "folder"
    ):
        assert shard_bytes == pytest.approx(sum(nbytes) / 2, rel=0.01)
        assert growth <= shard_bytes + max(nbytes) + 2**24 < sum(nbytes)
