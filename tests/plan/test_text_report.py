"""Printed predictions and searches, word for word, and as JSON."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import rich.console

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.metrics.prediction import (
    Category,
    MemoryPrediction,
    Prediction,
    TimePrediction,
    Volume,
)
from fsdptoys.plan.search.advice import Advice
from fsdptoys.plan.search.ranking import Candidate
from fsdptoys.plan.search.search import SearchResult
from fsdptoys.plan.search_report import print_command, print_search, search_to_dict
from fsdptoys.plan.text_report import advice_to_dict, print_prediction
from tests.harness.traced_runs import imagined_hardware

WORDS = ("model=llama2_7b", "train.seq_len=2048", "parallel.param_dtype=bfloat16")
LEAN = (
    "train.batch_size=2",
    "memory.gradient_checkpointing=full",
    "memory.chunk_loss=true",
)
HYBRID = ("mesh.fsdp_size=8", *LEAN)

HARDWARE = dataclasses.replace(
    imagined_hardware(devices_per_node=8), title="Imagined 80 GB"
)

PREDICTION = Prediction(
    method="estimated",
    hardware="imagined",
    world_size=16,
    tokens_per_step=16 * 2 * 2048,
    model_flops_per_step=2e14,
    peak_flops=1e15,
    memory=MemoryPrediction(
        end_bytes=10 * GIB,
        peak_bytes=50 * GIB,
        reserved_bytes=60 * GIB,
        peak_phase="backward",
        categories={
            Category.parameters: 10 * GIB,
            Category.activations: 40 * GIB,
            Category.buffers: 2**20,
        },
        streams={"compute": 58 * GIB, "all-gather": 2 * GIB},
        host_bytes=3 * GIB,
    ),
    time=TimePrediction(
        step_seconds=0.5,
        compute_seconds=0.4,
        exposed_communication_seconds=0.08,
        exposed_transfer_seconds=0.0,
        host_seconds=0.02,
        kinds={"element-wise": 0.1, "matrix products": 0.3},
        volumes=(
            Volume("all_reduce", "replicate", 2, 33, GIB // 2, 0.011),
            Volume("all_gather", "shard", 8, 65, 23 * GIB, 0.25),
        ),
    ),
    caveats=(
        (
            "a doubt that has [brackets] and so many words that one line of eighty characters does "
            "not hold them all"
        ),
    ),
)

ADVICE = (
    Advice(
        ("memory.gradient_checkpointing=none",),
        75 * GIB,
        150000.0,
        15 * GIB,
        0.144,
        True,
    ),
    Advice(("train.batch_size=4",), 61.5 * GIB, 140000.0, 3 * GIB // 2, 0.068, True),
)

PAGES = Path(__file__).parent / "pages"
PAGE = (PAGES / "prediction.txt").read_text(encoding="utf-8")
SEARCH_PAGE = (PAGES / "search.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def config() -> Config:
    return compose_config([*WORDS, *HYBRID])


def printed(
    show: object, width: int = 80, encoding: str = "ascii", **options: object
) -> str:
    """A page as piped, without trailing spaces."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    assert callable(show)
    show(rich.console.Console(file=file, width=width, legacy_windows=False, **options))  # type: ignore[arg-type]
    file.seek(0)
    return "\n".join(line.rstrip() for line in file.read().splitlines()) + "\n"


def prediction_page(
    config: Config, prediction: Prediction = PREDICTION, gib: float = 80, **how: object
) -> str:
    advice = how.pop("advice", ADVICE)
    return printed(
        lambda console: print_prediction(
            config, prediction, HARDWARE, gib * GIB, advice, console
        ),  # type: ignore[arg-type]
        **how,  # type: ignore[arg-type]
    )


def test_prediction_is_printed_word_for_word(config: Config) -> None:
    """Oracle: the page, word for word, in ASCII; in UTF-8 only the bars differ."""
    assert prediction_page(config) == PAGE
    assert prediction_page(config, encoding="utf-8") == PAGE.replace("#", "█")
    assert all(len(line) <= 80 for line in PAGE.splitlines())


def test_excess_memory_and_advice_are_printed(config: Config) -> None:
    """Oracle: the lines, word for word, for the three kinds of advice."""
    assert (
        "reserved     60.00 GiB  does not fit in 50.00 GiB, 10.00 GiB too much\n"
        in prediction_page(config, gib=50)
    )
    changes = {
        "reserved_bytes": 40.0 * GIB,
        "reserved_change_bytes": -20 * GIB,
        "speed_change": -0.1,
    }
    saves = dataclasses.replace(ADVICE[1], **changes)
    page = prediction_page(config, gib=50, advice=[saves])
    assert "\nChanges that make it fit\n" in page
    assert "40.00 GiB   140,000  -10.0%  train.batch_size=4" in page
    page = prediction_page(
        config, gib=30, advice=[dataclasses.replace(saves, fits=False)]
    )
    assert (
        "\nLargest savings; no two changes make it fit, so try fsdptoys plan search\n"
        in page
    )
    assert "Faster settings" not in prediction_page(config, advice=[])


def test_single_rank_and_an_unknown_peak_are_reported(config: Config) -> None:
    """Oracle: the lines, word for word; no communication, no host memory, no bars where there is
    nothing."""
    alone = dataclasses.replace(
        PREDICTION,
        world_size=1,
        tokens_per_step=4096,
        peak_flops=None,
        memory=MemoryPrediction(5 * 2**20, GIB, GIB, "forward"),
        time=TimePrediction(2.0, 2.0, 0.0, 0.0, 0.0),
        caveats=(),
    )
    page = prediction_page(
        compose_config([*WORDS, "parallel=single"]), alone, advice=[]
    )
    assert (
        "1 rank on Imagined 80 GB; estimated\nsingle: full parameters on each rank, bfloat16\n"
        in page
    )
    assert "end of step     5 MiB  allocated\n" in page
    assert "\n2,048 tokens/s; MFU unknown: no peak for this dtype\n" in page
    for absent in (
        "Communication",
        "\nhost ",
        "At the peak",
        "by stream",
        "Caveats",
        "Faster settings",
    ):
        assert absent not in page


def search_result(config: Config) -> SearchResult:
    closed = dataclasses.replace(PREDICTION, method="estimated")

    def candidate(
        config: Config, more: tuple[str, ...], gib: float, tokens: int, position: int
    ) -> Candidate:
        host = closed.memory.host_bytes if position == 1 else 0
        memory = dataclasses.replace(
            closed.memory, reserved_bytes=int(gib * GIB), host_bytes=host
        )
        prediction = dataclasses.replace(
            closed,
            memory=memory,
            tokens_per_step=tokens,
            model_flops_per_step=2e14 * tokens / 65536,
        )
        return Candidate(
            (*WORDS, *more),
            config,
            prediction,
            len(more),
            {"position": position},
            position,
        )

    small = ("parallel=fsdp1", "parallel.wrap=block_attn_mlp", *LEAN)
    small += ("memory.activation_offload=true", "memory.optimizer_offload=true")
    first = candidate(config, HYBRID, 60, 65536, 1)
    one = dataclasses.replace(
        config, train=dataclasses.replace(config.train, batch_size=1)
    )
    second = candidate(
        one,
        tuple(override for override in HYBRID if "batch" not in override),
        12,
        32768,
        2,
    )
    third = candidate(compose_config([*WORDS, *small]), small, 6, 16384, 3)
    over = candidate(config, HYBRID, 90, 70000, 0)
    refused = {"a sentence": 2}
    return SearchResult(HARDWARE, 16, 80 * GIB, [first, second, third], [over], refused)


def test_search_is_printed_word_for_word(config: Config) -> None:
    """Oracle: the page, word for word; the command is one line of any length, and each combination
    is listed with its best batch only."""
    result = search_result(config)
    assert (
        printed(lambda console: print_search(result, 10, PREDICTION.caveats, console))
        == SEARCH_PAGE
    )
    one_row = printed(lambda console: print_search(result, 1, (), console))
    assert one_row.split("Pareto front")[0].count("GiB  ") == 2


@pytest.mark.parametrize(
    ("ranks", "overrides", "more"),
    [
        (16, (), "launch.nnodes=2 launch.rdzv_endpoint=HOST:29400"),
        (16, ("launch.nnodes=2", "launch.rdzv_endpoint=a:1"), ""),
        (8, (), ""),
        (4, (), "launch.nproc_per_node=4"),
        (
            12,
            (),
            "launch.nnodes=2 launch.rdzv_endpoint=HOST:29400 launch.nproc_per_node=6",
        ),
        (1, (), "launch.nproc_per_node=1"),
    ],
)
def test_printed_command_starts_the_predicted_number_of_ranks(
    config: Config, ranks: int, overrides: tuple[str, ...], more: str
) -> None:
    """Oracle: computed by hand, for machines of eight devices; typed settings are not repeated."""
    prediction = dataclasses.replace(PREDICTION, world_size=ranks)
    candidate = Candidate((*WORDS, *overrides), config, prediction, 0)
    line = printed(
        lambda console: print_command(candidate, HARDWARE, console)
    ).splitlines()[-1]
    assert line == " ".join(["bash run_fsdp.sh", *WORDS, *overrides, *more.split()])


def test_search_and_advice_serialize_to_json(config: Config) -> None:
    """Oracle: the JSON read back."""
    read = json.loads(json.dumps(search_to_dict(search_result(config), ("a caveat",))))
    assert read["best"]["words"][3] == "mesh.fsdp_size=8"
    assert (
        read["caveats"] == ["a caveat"]
        and read["fitting"] == 3
        and read["refused"] == {"a sentence": 2}
    )
    assert [
        row["prediction"]["memory"]["reserved_bytes"] / GIB for row in read["frontier"]
    ] == [
        6,
        12,
        60,
    ]
    assert json.loads(json.dumps(advice_to_dict(ADVICE)))[1]["words"] == [
        "train.batch_size=4"
    ]
