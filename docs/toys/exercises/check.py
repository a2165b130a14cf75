"""Check the exercises: ``python docs/toys/exercises/check.py ring``; without a name, all of them.

Runs 2, 3 and 4 processes on this machine, with gloo, and compares results and the collectives used.
Prints the expected value where an answer differs, and exits with status 1.

``--folder FOLDER`` reads the answers from files of the same names elsewhere.
"""

import argparse
import importlib.util
import itertools
import multiprocessing
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))  # step.py takes its optimizer from fsdptoys.toys
WORLD_SIZES = (2, 3, 4)
PATIENCE_SECONDS = 60


class Traffic(TorchDispatchMode):
    """Counts the calls of ``torch.distributed`` and their elements, and notes the largest tensor of
    other calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count one operator and run it."""
        if function.namespace == "c10d":
            name = function.overloadpacket.__name__.strip("_")
            self.calls[name] += 1
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.elements[name] += sum(tensor.numel() for tensor in tensors)
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def check_ring(answer: ModuleType, rank: int, ranks: int) -> None:
    """Compare sums, and the number of elements sent."""
    for length in (1, 3, 12, 1001):
        own = torch.arange(length, dtype=torch.float32) * (rank + 1)
        expected = torch.arange(length, dtype=torch.float32) * sum(range(1, ranks + 1))
        with Traffic() as traffic:
            answer.all_reduce(own)
        right = torch.equal(own, expected)
        expect(right, f"the sum of {length} elements: {expected[:5]}, not {own[:5]}")
        others = {name for name in traffic.calls if name not in ("send", "recv", "recv_any_source")}
        expect(not others, f"nothing but send and recv: {', '.join(sorted(others))} was used")
        most = 2 * (ranks - 1) * -(-length // ranks)
        expect(
            traffic.elements["send"] <= most,
            f"at most {most} of {length} sent, not {traffic.elements['send']}",
        )


def check_buckets(answer: ModuleType, rank: int, ranks: int) -> None:
    """Check the two rules that determine the buckets."""
    for sizes in ([4, 4, 4, 4, 4], [1, 9, 1, 30, 2, 2], [7], [50, 1, 1]):
        buckets = answer.fill_buckets(sizes, 8)
        flat = [number for bucket in buckets for number in bucket]
        expect(
            flat == list(reversed(range(len(sizes)))),
            f"each parameter of {sizes} once, the last first: {flat}",
        )
        for index, bucket in enumerate(buckets):
            expect(bool(bucket), "no empty bucket")
            after = sum(sizes[number] for number in bucket)
            before = after - sum(sizes[number] for number in bucket[-1:])
            expect(before < 8, f"nothing more in a full bucket: {bucket} of {sizes}")
            expect(
                after >= 8 or index == len(buckets) - 1,
                f"only full buckets closed, unlike {bucket} of {sizes}",
            )


def check_step(answer: ModuleType, rank: int, ranks: int) -> None:
    """Compare in every bit with torch.optim.AdamW on the whole parameter."""
    for length in (2, 24, 101):
        torch.manual_seed(length)
        whole = nn.Parameter(torch.randn(length))
        own = whole.detach().clone()
        state = {}
        adamw = torch.optim.AdamW([whole], lr=1e-2, foreach=False)
        for step in (1, 2, 3):
            whole.grad = torch.randn(length)
            adamw.step()
            answer.sharded_adamw_step(own, whole.grad.clone(), state, step)
            apart = (own - whole.detach()).abs().max()
            right = torch.equal(own, whole.detach())
            expect(right, f"the bits of AdamW after step {step}, not {apart:.1e} off")
        size = sum(tensor.numel() for tensor in state.values())
        most = 2 * -(-length // ranks)
        expect(size <= most, f"at most {most} elements of states kept, not {size}")


def check_rows(answer: ModuleType, rank: int, ranks: int) -> None:
    """Compare with torch.chunk, and with the whole tensor."""
    for rows in (1, 2, 4, 5, 6, 7, 16):
        whole = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
        chunks = list(whole.chunk(ranks))
        chunks += [whole[:0]] * (ranks - len(chunks))
        first, after = answer.own_rows(rows, rank, ranks)
        right = torch.equal(whole[first:after], chunks[rank])
        expect(right, f"rows of rank {rank} of {ranks}, of {rows}")
        with Traffic() as traffic:
            gathered = answer.gather_rows(chunks[rank].clone(), rows)
        right = torch.equal(gathered, whole)
        expect(right, f"the whole of {rows} rows: {whole.tolist()}, not {gathered.tolist()}")
        expect(sum(traffic.calls.values()) == 1, f"one collective, not {dict(traffic.calls)}")


def check_owners(answer: ModuleType, rank: int, ranks: int) -> None:
    """Compare with the best of all tables."""
    for sizes in (
        [5, 5, 4, 4, 3, 3, 3],
        [1, 8, 1, 8, 1, 8],
        [2, 2, 2, 2, 2, 2, 6],
        [2, 3, 7, 1, 1],
        [10, 1, 1],
    ):
        owners = answer.assign_owners(sizes, ranks)
        expect(
            len(owners) == len(sizes) and set(owners) <= set(range(ranks)),
            f"owners of all of {sizes}: {owners}",
        )
        tables = itertools.product(range(ranks), repeat=len(sizes))
        best = min(fullest(sizes, table, ranks) for table in tables)
        bound = (4 / 3 - 1 / (3 * ranks)) * best
        load = fullest(sizes, owners, ranks)
        expect(load <= bound + 1e-9, f"at most {bound:.2f} on a rank for {sizes}, not {load}")


def fullest(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> int:
    """Return the bytes of the fullest rank."""
    return max(
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    )


def check_linear(answer: ModuleType, rank: int, ranks: int) -> None:
    """Compare with nn.functional.linear on the batches of all ranks."""
    torch.manual_seed(0)
    weight = torch.randn(12, 64)
    batches = [torch.randn(5, 64) for _ in range(ranks)]
    whole = weight.clone().requires_grad_()
    sum((nn.functional.linear(batch, whole) ** 2).sum() for batch in batches).div(ranks).backward()
    module = answer.ShardedLinear(weight.clone())
    parameters = list(module.parameters())
    expect(
        len(parameters) == 1 and parameters[0] is module.shard, "the shard is the only parameter"
    )
    rows = slice(12 // ranks * rank, 12 // ranks * (rank + 1))
    expect(
        torch.equal(module.shard.detach(), weight[rows]),
        f"rows {rows.start} to {rows.stop} on rank {rank}",
    )
    saved: list[int] = []
    inputs = batches[rank].clone().requires_grad_()

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with Traffic() as traffic:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = module(inputs)
        (output**2).sum().backward()
    torch.testing.assert_close(output.detach(), nn.functional.linear(batches[rank], weight))
    expect(
        max(saved, default=0) < weight.numel(),
        "nothing of the whole weight's size is kept for the backward",
    )
    assert whole.grad is not None
    torch.testing.assert_close(module.shard.grad, whole.grad[rows])
    torch.testing.assert_close(inputs.grad, 2 * output.detach() @ weight)
    kinds = Counter({"gather": 0, "reduce_scatter": 0})
    for name, calls in traffic.calls.items():
        kinds[
            "reduce_scatter" if "reduce_scatter" in name else "gather" if "gather" in name else name
        ] += calls
    expect(
        kinds == {"gather": 2, "reduce_scatter": 1},
        f"two all-gathers and a reduce-scatter, not {dict(kinds)}",
    )


def check_attention(answer: ModuleType, rank: int, ranks: int) -> None:
    """Compare with attention to all keys, and the sends; large scores are there to overflow."""
    for rows, columns, scale in ((9, 2, 1.0), (7, 3, 100.0)):
        torch.manual_seed(rows)
        q, k, v = torch.randn(3, ranks * rows, columns)
        q = q * scale
        own = slice(rank * rows, (rank + 1) * rows)
        expected = (q[own] @ k.T / columns**0.5).softmax(1) @ v
        with Traffic() as traffic:
            result = answer.attend(q[own].clone(), k[own].clone(), v[own].clone())
        right = result.shape == expected.shape
        right = right and torch.allclose(result, expected, rtol=1e-4, atol=1e-5)
        expect(right, f"attention to the keys of all ranks: {expected[0]}, not {result[0]}")
        others = {name for name in traffic.calls if name not in ("send", "recv", "recv_any_source")}
        expect(not others, f"nothing but sends and receives: {', '.join(sorted(others))} was used")
        most = 2 * (ranks - 1) * rows * columns
        expect(
            traffic.elements["send"] <= most,
            f"at most {most} elements sent, not {traffic.elements['send']}",
        )
        scores = ranks * rows * rows
        expect(
            traffic.largest < scores,
            f"no tensor as large as all {scores} scores, but one has {traffic.largest}",
        )


def check_dispatch(answer: ModuleType, rank: int, ranks: int) -> None:
    """Compare with all functions on one rank: random targets, one target for all, and a rank
    without rows."""
    generator = torch.Generator().manual_seed(rank)
    for case in ("random", "last", "none on rank 0"):
        count = 0 if case == "none on rank 0" and rank == 0 else 5 + rank
        targets = torch.randint(ranks, (count,), generator=generator)
        targets = torch.full_like(targets, ranks - 1) if case == "last" else targets
        rows = torch.randn(count, 3, generator=generator).requires_grad_()
        factor = nn.Parameter(torch.tensor(rank + 2.0))
        with Traffic() as traffic:
            out = answer.apply_elsewhere(
                rows, targets, lambda rows, factor=factor: rows * factor + rank
            )
            out.sum().backward()
        factors = (targets + 2.0).unsqueeze(1)
        expected = rows.detach() * factors + targets.unsqueeze(1)
        expect(
            out.shape == rows.shape,
            f"{tuple(rows.shape)} for {case} targets, not {tuple(out.shape)}",
        )
        expect(
            torch.allclose(out, expected), f"results in the order of the rows, for {case} targets"
        )
        expect(rows.grad is not None, "a gradient of the rows")
        expect(
            torch.equal(rows.grad, factors.expand_as(rows)),
            f"the functions' gradients, for {case} targets",
        )
        sums = torch.zeros(ranks).index_add_(0, targets, rows.detach().sum(1))
        dist.all_reduce(sums)
        expect(
            factor.grad is not None,
            f"zeros as the gradient of a function without rows, for {case} targets",
        )
        expect(
            torch.allclose(factor.grad, sums[rank], atol=1e-5),
            f"all rows in a function's gradient, {case} targets",
        )
        expect(
            traffic.calls == {"alltoall_base": 5},
            f"five all_to_all_single, not {dict(traffic.calls)}",
        )


CHECKS: dict[str, Callable[[ModuleType, int, int], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        *(check_ring, check_buckets, check_step, check_rows),
        *(check_owners, check_linear, check_attention, check_dispatch),
    )
}


def expect(holds: bool, sentence: str) -> None:
    """Check an expectation.

    Raises:
        AssertionError: with the expectation.
    """
    if not holds:
        raise AssertionError(f"expected {sentence}")


def load_answer(folder: Path, name: str) -> ModuleType:
    """Import one file by its path."""
    spec = importlib.util.spec_from_file_location(f"answer_{name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Check answers on this rank and the others of its group.

    Returns:
        Exercise → mistake, for the wrong answers.
    """
    wrong = {}
    for name in names:
        try:
            CHECKS[name](load_answer(folder, name), dist.get_rank(), dist.get_world_size())
        except NotImplementedError:
            wrong[name] = "not answered yet"
        except AssertionError as error:
            wrong[name] = str(error).strip()
        except Exception:
            wrong[name] = traceback.format_exc()
    return wrong


def run_rank(rank: int, ranks: int, store: str, folder: Path, name: str, answers: Any) -> None:
    """Run one rank."""
    # torch 2.13 has new names for all_gather_into_tensor and reduce_scatter_tensor, older ones do
    # not know them.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    dist.barrier()  # no rank may leave before all have joined
    answers.put(check(folder, [name]))
    dist.destroy_process_group()


def run(folder: Path, name: str, ranks: int) -> str | None:
    """Check one answer on ``ranks`` processes; return the mistake that the first rank noticed."""
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    results: list[dict[str, str]] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    with tempfile.TemporaryDirectory() as scratch:
        answers = context.SimpleQueue()
        processes = [
            context.Process(
                target=run_rank,
                args=(rank, ranks, f"{scratch}/store", folder, name, answers),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        while len(results) < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
            while not answers.empty():
                results.append(answers.get())
            if any(results):
                # A rank whose answer is wrong may leave the others waiting.
                deadline = min(deadline, time.monotonic() + 1)
        for process in processes:
            process.kill()
            process.join()
    wrong = [result[name] for result in results if result]
    if not wrong and len(results) < ranks:
        return f"no answer within {PATIENCE_SECONDS} seconds; a rank waits for what nobody sends"
    return wrong[0] if wrong else None


def main() -> int:
    """Check and print; return 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CHECKS))
    parser.add_argument("--folder", type=Path, default=HERE, help="where the answers are")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(CHECKS))
    if unknown:
        parser.error(f"{', '.join(unknown)} is none of the exercises: {', '.join(CHECKS)}")
    status = 0
    for name in args.names or CHECKS:
        message = None
        for ranks in WORLD_SIZES:
            message = run(args.folder.resolve(), name, ranks)
            if message is not None:
                status = 1
                print(f"{name}, {ranks} ranks: {message}", flush=True)
                break
        if message is None:
            print(f"{name}: right", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
