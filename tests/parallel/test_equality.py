"""Every strategy computes the same training: the bits of losses, norms and parameters against one process."""

from itertools import product
from typing import Any

import pytest
import torch

from fsdptoys.config.schema import Config
from fsdptoys.memory import ActivationOffload, CPUOffloadExecutor, GradientCheckpointing, MemoryConfig
from fsdptoys.memory.activation_offload import Copies
from fsdptoys.models import MODELS
from fsdptoys.optim import AdamWConfig, Implementation, SGDConfig, WeightDecayOn
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig, SingleConfig, ToyFSDPConfig
from fsdptoys.parallel.fsdp import TORCH, ReshardAfterForward, Wrap
from fsdptoys.parallel.precision import DType
from fsdptoys.train import build as prepare_module
from fsdptoys.train.trainer import Trainer
from scripts.parity import Outcome, hash_parameters, train_all
from scripts.ranks import run_ranks
from tests.parallel.runs import TINY, WRAPS, make_config, tiny_model

CHECKPOINTED = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full, checkpointing_start_index=1)
OFFLOADED = MemoryConfig(cpu_offload=True)

STRATEGIES: dict[str, tuple[ParallelConfig, int]] = {
    "ddp": (DDPConfig(), -1),
    "fsdp1": (FSDP1Config(), -1),
    "fsdp1 flat": (FSDP1Config(use_orig_params=False), -1),
    "fsdp2": (FSDP2Config(), -1),
    "hsdp1": (FSDP1Config(), 2),
    "hsdp2": (FSDP2Config(), 2),
}


def strategies_on(world_size: int) -> dict[str, tuple[ParallelConfig, int]]:
    """HSDP needs two axes, and under FSDP2 on a CPU torch 2.8."""
    left_out = set() if world_size == 4 else {"hsdp1", "hsdp2"}
    left_out |= {"hsdp2"} if TORCH < (2, 8) else set()
    return {name: row for name, row in STRATEGIES.items() if name not in left_out}


def assert_equal(outcomes: dict[str, Outcome], reference: Outcome) -> None:
    assert {name: outcome for name, outcome in outcomes.items() if outcome != reference} == {}


def single(world_size: int, **options: object) -> Outcome:
    parallel = SingleConfig(simulated_ranks=world_size, param_dtype=options.pop("param_dtype", DType.float32))  # type: ignore[arg-type]
    outcome: Outcome = run_ranks(1, train_all, [make_config(parallel, 1, **options)])[0][0]  # type: ignore[arg-type]
    return outcome


def with_dtype(config: ParallelConfig, dtype: DType) -> ParallelConfig:
    return type(config)(**{**vars(config), "param_dtype": dtype})


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_strategies_match_a_single_process_bitwise(
    world_size: int, dtype: DType, request: pytest.FixtureRequest
) -> None:
    """Oracle: one process that runs the same micro-batches in turn; deterministic mode.

    In bf16 on four ranks: this covers hierarchical sharding, which the other tests do not. The second step of four
    ranks already starts from sharded states.
    """
    options = {}
    if world_size == 4:
        request.getfixturevalue("unmeasured")
        options["steps"] = 2
    rows = strategies_on(world_size)
    if world_size == 4 and dtype is DType.bfloat16:
        rows = {name: row for name, row in rows.items() if name.startswith("hsdp")}
    configs = [
        make_config(with_dtype(parallel, dtype), world_size, fsdp_size=fsdp_size, **options)
        for parallel, fsdp_size in rows.values()
    ]
    outcomes = dict(zip(rows, run_ranks(world_size, train_all, configs)[0], strict=True))
    assert_equal(outcomes, single(world_size, param_dtype=dtype, **options))


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("family", TINY)
def test_every_family_matches_a_single_process_bitwise(family: str) -> None:
    """Oracle: one process that runs the same micro-batches in turn; with experts and their losses.

    Each row is trained in one of two dtypes, which alternate over rows and over families, so that any two of
    family, row and dtype meet. The rows that need four ranks get them, and so does FSDP2, which then shards experts
    along another dim, with one micro-batch each: two ranks and the test above have several.
    """
    on_four = [name for name in strategies_on(4) if name == "fsdp2" or name.startswith("hsdp")]
    rows: dict[str, tuple[ParallelConfig, int, dict[str, Any]]] = {
        name: (parallel, 4 if name in on_four else 2, {"fsdp_size": fsdp_size})
        for name, (parallel, fsdp_size) in strategies_on(4).items()
    }
    rows["fsdp2 checkpointing"] = (FSDP2Config(), 2, {"memory": CHECKPOINTED})
    rows["fsdp2 parts"] = (FSDP2Config(wrap=Wrap.block_attn_mlp), 2, {})
    rows["fsdp2 cpu offload"] = (FSDP2Config(), 2, {"memory": OFFLOADED})
    classes = ["Attention", "GELUFeedForward" if family == "gpt2" else "Experts" if family == "qwen3_moe" else "SwiGLU"]
    rows["fsdp1 by class"] = (FSDP1Config(wrap_classes=classes), 2, {"memory": CHECKPOINTED})
    rows["fsdp2 by class"] = (FSDP2Config(wrap_classes=["Linear", "Experts"][: 1 + ("moe" in family)]), 2, {})
    rows["toy_fsdp by size"] = (ToyFSDPConfig(min_params=40), 2, {"memory": CHECKPOINTED})
    if "hsdp2" in rows:
        rows["hsdp2 by class"] = (FSDP2Config(wrap_classes=classes), 4, {"fsdp_size": 2})
    dtypes = {
        name: (DType.float32, DType.bfloat16)[(index + list(TINY).index(family)) % 2] for index, name in enumerate(rows)
    }
    for world_size in (2, 4):
        options: dict[str, Any] = {"model": TINY[family], "steps": 2, "grad_accum": 4 // world_size}
        configs = {
            name: make_config(with_dtype(parallel, dtypes[name]), ranks, **own, **options)
            for name, (parallel, ranks, own) in rows.items()
            if ranks == world_size
        }
        outcomes = dict(zip(configs, run_ranks(world_size, train_all, list(configs.values()))[0], strict=True))
        for dtype in {dtypes[name] for name in configs}:
            of_dtype = {name: outcome for name, outcome in outcomes.items() if dtypes[name] is dtype}
            assert_equal(of_dtype, single(world_size, param_dtype=dtype, **options))


def test_tiny_models_cover_all_families() -> None:
    """Oracle: the registry; a missing family would be trained under no strategy."""
    assert {config.family for config in [tiny_model(), *TINY.values()]} == set(MODELS)


@pytest.mark.usefixtures("unmeasured")
def test_default_mode_matches_a_single_process_closely_and_fsdp1_fsdp2_bitwise() -> None:
    """Oracle: one process in float32; at two ranks FSDP1 and FSDP2 add the same two numbers."""
    names = [name for name in STRATEGIES if not name.startswith("hsdp")]
    configs = [make_config(STRATEGIES[name][0], 2, deterministic=False) for name in names]
    outcomes = dict(zip(names, run_ranks(2, train_all, configs)[0], strict=True))
    reference = single(2, deterministic=False)
    for outcome in outcomes.values():
        assert outcome.losses == pytest.approx(reference.losses, rel=1e-6)
        assert outcome.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)
    assert outcomes["fsdp1"] == outcomes["fsdp2"] == outcomes["fsdp1 flat"]


OF_VARIANTS: dict[str, Any] = {"tie_embeddings": True, "steps": 2}


def variants() -> dict[str, Config]:
    """All FSDP settings that must not change a bit, over two ranks and tied embeddings.

    Any two values of wrapping, resharding and checkpointing meet under each of the FSDPs.
    """
    made: dict[str, Config] = {}
    for (first, (wrap, choice)), (second, reshard) in product(enumerate(WRAPS.items()), enumerate(ReshardAfterForward)):
        checkpointed = (first + second) % 2 == 1
        memory = CHECKPOINTED if checkpointed else None
        for name, parallel in {
            "fsdp1": FSDP1Config(reshard_after_forward=reshard, forward_prefetch=1, backward_prefetch=0, **choice),
            "fsdp2": FSDP2Config(reshard_after_forward=reshard, forward_prefetch=2, backward_prefetch=2, **choice),
        }.items():
            label = f"{name} {wrap} reshard={reshard.value} checkpointing={checkpointed}"
            made[label] = make_config(parallel, 2, memory=memory, **OF_VARIANTS)
    made["ddp checkpointing"] = make_config(DDPConfig(), 2, memory=CHECKPOINTED, **OF_VARIANTS)
    made["ddp small buckets"] = make_config(DDPConfig(bucket_cap_mb=1), 2, **OF_VARIANTS)
    made["fsdp2 without backward prefetch"] = make_config(FSDP2Config(backward_prefetch=0), 2, **OF_VARIANTS)
    made["fsdp2 cpu offload"] = make_config(FSDP2Config(), 2, memory=OFFLOADED, **OF_VARIANTS)
    return made


@pytest.mark.usefixtures("unmeasured")
def test_every_setting_of_a_strategy_is_bitwise_equal() -> None:
    """Oracle: one process without any of them, tied embeddings."""
    made = variants()
    outcomes = dict(zip(made, run_ranks(2, train_all, list(made.values()))[0], strict=True))
    assert_equal(outcomes, single(2, **OF_VARIANTS))


def train_moving_all(configs: list[Config]) -> tuple[list[Outcome], int]:
    """Train with activation offload that moves small tensors too; also return the number of copies."""
    copies = 0

    class Counting(Copies):
        def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
            nonlocal copies
            copies += 1
            super().start(target, source)

    def build(device: torch.device) -> ActivationOffload:
        return ActivationOffload(device, min_bytes=0, copies=Counting())

    prepare_module.ActivationOffload = build  # type: ignore[assignment, misc]
    return train_all(configs), copies


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16], ids=lambda dtype: dtype.value)
def test_all_memory_switches_together_are_bitwise_equal(dtype: DType, request: pytest.FixtureRequest) -> None:
    """Oracle: one process with the chunked loss alone, the only switch that changes the order of addition."""
    if dtype is DType.bfloat16:
        request.getfixturevalue("unmeasured")
    chunks = {"chunk_loss": True, "chunk_tokens": "20"}
    switches = {
        **chunks,
        "gradient_checkpointing": GradientCheckpointing.selective,
        "activation_offload": True,
        "optimizer_offload": True,
        "offload_fraction": 0.8,
        "offload_bucket_mib": 1,
    }
    options = {"label_smoothing": 0.1, "z_loss_coef": 1e-3, "eval_every": 2, "eval_batches": 1, "tie_embeddings": True}
    options["steps"] = 3  # one after the evaluation
    configs = {
        name: make_config(with_dtype(parallel, dtype), 2, fsdp_size=size, memory=MemoryConfig(**switches), **options)
        for name, (parallel, size) in strategies_on(2).items()
    }
    on_cpu = MemoryConfig(**chunks, cpu_offload=True, cpu_offload_executor=CPUOffloadExecutor.overlapped)
    configs["fsdp2 on the cpu"] = make_config(with_dtype(FSDP2Config(), dtype), 2, memory=on_cpu, **options)
    results, copies = run_ranks(2, train_moving_all, list(configs.values()))[0]
    assert copies > 0
    outcomes = dict(zip(configs, results, strict=True))
    assert_equal(outcomes, single(2, param_dtype=dtype, memory=MemoryConfig(**chunks), **options))


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("tie_embeddings", [False, True], ids=["untied", "tied"])
def test_bf16_parameters_and_checkpointing_combine_under_every_strategy(tie_embeddings: bool) -> None:
    """Oracle: one process without checkpointing, bitwise; recomputation must see the same low-precision copies."""
    options = {"tie_embeddings": tie_embeddings, "steps": 2}
    plain = single(2, param_dtype=DType.bfloat16, **options)
    assert single(2, param_dtype=DType.bfloat16, memory=CHECKPOINTED, **options) == plain
    names = ["ddp", "fsdp1", "fsdp2"]
    configs = [
        make_config(with_dtype(STRATEGIES[name][0], DType.bfloat16), 2, memory=CHECKPOINTED, **options)
        for name in names
    ]
    assert_equal(dict(zip(names, run_ranks(2, train_all, configs)[0], strict=True)), plain)


@pytest.mark.usefixtures("unmeasured")
def test_tied_bf16_parameters_accumulate_on_one_rank() -> None:
    """Oracle: one process; FSDP1 cannot keep an unreduced bf16 gradient of a weight with two names."""
    options = {"param_dtype": DType.bfloat16, "tie_embeddings": True, "deterministic": False, "grad_accum": 3}
    reference = single(1, **options)
    dtype = options.pop("param_dtype")
    configs = [
        make_config(with_dtype(parallel, dtype), 1, **options)
        for parallel in (DDPConfig(), FSDP1Config(), FSDP2Config())
    ]
    assert all(outcome == reference for outcome in run_ranks(1, train_all, configs)[0])


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "optim",
    [
        SGDConfig(lr=0.1, momentum=0.9, nesterov=True),
        AdamWConfig(lr=1e-2, weight_decay_on=WeightDecayOn.matrices),
        AdamWConfig(lr=1e-2, implementation=Implementation.foreach),
        AdamWConfig(lr=1e-2, implementation=Implementation.for_loop),
    ],
    ids=["sgd", "adamw", "foreach", "for_loop"],
)
def test_optimizers_update_shards_like_full_parameters(optim: AdamWConfig | SGDConfig) -> None:
    """Oracle: one process with the same optimizer; decay applies to matrices only although shards are flat."""
    names = ["ddp", "fsdp1", "fsdp2"]
    configs = [make_config(STRATEGIES[name][0], 2, optim=optim, steps=3) for name in names]
    outcomes = dict(zip(names, run_ranks(2, train_all, configs)[0], strict=True))
    assert_equal(outcomes, single(2, optim=optim, steps=3))


@pytest.mark.usefixtures("unmeasured")
def test_fused_adamw_matches_a_single_process_closely() -> None:
    """Oracle: one process with the same kernel, whose vector and tail loops round differently: losses to 1e-6."""
    options = {"optim": AdamWConfig(lr=1e-3, implementation=Implementation.fused), "deterministic": False}
    configs = [make_config(STRATEGIES[name][0], 2, **options) for name in ("ddp", "fsdp1", "fsdp2")]
    reference = single(2, **options)
    for outcome in run_ranks(2, train_all, configs)[0]:
        assert outcome.losses == pytest.approx(reference.losses, rel=1e-6)


def initial_hashes(configs: list[Config]) -> list[dict[str, str]]:
    return [hash_parameters(Trainer(config)) for config in configs]


@pytest.mark.usefixtures("unmeasured")
def test_initial_values_are_the_same_on_every_layout() -> None:
    """Oracle: one process; the hash of every full parameter under all strategies on 1, 2 and 4 ranks."""
    (expected,) = run_ranks(1, initial_hashes, [make_config(SingleConfig(), 1)])[0]
    assert len(expected) == 30 and len(set(expected.values())) == 30 - 6
    for world_size in (1, 2, 4):
        rows = strategies_on(world_size)
        configs = [make_config(parallel, world_size, fsdp_size=size) for parallel, size in rows.values()]
        for name, hashes in zip(rows, run_ranks(world_size, initial_hashes, configs)[0], strict=True):
            assert hashes == expected, f"{name} on {world_size} ranks"


def test_init_seed_changes_all_weights_except_norms() -> None:
    """Oracle: other hashes; the equality above would hold for constants too."""
    first, second = run_ranks(1, initial_hashes, [make_config(SingleConfig(), 1, init_seed=seed) for seed in (0, 1)])[0]
    differing = {name for name in first if first[name] != second[name]}
    assert differing == {name for name in first if not name.endswith("norm.weight")}


def first_step(configs: list[Config]) -> list[tuple[float, float, float]]:
    """Loss, norm before clipping, and norm of the gradient passed to the optimizer."""
    results = []
    for config in configs:
        trainer = Trainer(config)
        seen: list[torch.Tensor] = []
        trainer.optimizer.register_step_pre_hook(
            lambda *_, trainer=trainer, seen=seen: seen.append(trainer.strategy.clip_grad_norm(float("inf")))
        )
        trainer.train()
        results.append((trainer.history[0].loss, trainer.history[0].grad_norm, seen[0].item()))
    return results


def test_clipping_scales_every_strategys_gradient_to_the_same_norm() -> None:
    """Oracle: torch.nn.utils.clip_grad_norm_ over the full gradient of one process, then its norm."""
    max_norm = 0.05
    configs = [
        make_config(parallel, 2, steps=1, max_grad_norm=max_norm)
        for parallel in (DDPConfig(), FSDP1Config(), FSDP1Config(use_orig_params=False), FSDP2Config())
    ]
    configs.append(make_config(FSDP2Config(), 2, steps=1, max_grad_norm=max_norm, memory=OFFLOADED))

    def oracle() -> tuple[float, float]:
        trainer = Trainer(make_config(SingleConfig(simulated_ranks=2), 1, steps=1, max_grad_norm=None))
        params = [param for _, param in trainer.strategy.named_parameters()]
        norms: list[float] = []
        trainer.optimizer.register_step_pre_hook(
            lambda *_: norms.extend(
                [
                    torch.nn.utils.clip_grad_norm_(params, max_norm).item(),
                    torch.nn.utils.get_total_norm([param.grad for param in params]).item(),
                ]
            )
        )
        trainer.train()
        return norms[0], norms[1]

    before, after = run_ranks(1, oracle)[0]
    assert before > max_norm
    for _, norm, clipped in run_ranks(2, first_step, configs)[0]:
        assert norm == pytest.approx(before, rel=1e-6)
        assert clipped == pytest.approx(after, rel=1e-5)


def train_offloaded(configs: list[Config]) -> list[Outcome]:
    """Train with FSDP1's CPU offload, without its pinned memory and streams, which a CPU does not have."""
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign, assignment]
    torch.cpu.Stream.synchronize = lambda _: None  # type: ignore[attr-defined]
    for config in configs:
        config.memory.cpu_offload = True  # after validation, which requires an accelerator
    return train_all(configs)


@pytest.mark.parametrize("grad_accum", [1, 2])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["own", "flat"])
def test_fsdp1_cpu_offload_matches_training_without_offload(use_orig_params: bool, grad_accum: int) -> None:
    """Oracle: the same training without offload, bitwise."""

    def config() -> Config:
        parallel = FSDP1Config(use_orig_params=use_orig_params)
        return make_config(parallel, 2, grad_accum=grad_accum, deterministic=False)

    assert run_ranks(2, train_offloaded, [config()])[0] == run_ranks(2, train_all, [config()])[0]
