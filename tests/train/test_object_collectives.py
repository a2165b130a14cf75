"""Objects sent between ranks arrive equal, without pickles."""

import base64
import enum
import errno
import io
import json
import os
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.fsdp import _optim_utils as fsdp1

from fsdptoys.checkpoint.shard_format import Chunk, StoredTensor
from fsdptoys.errors import ConfigError
from fsdptoys.train.object_collectives import (
    JsonReader,
    JsonWriter,
    WireError,
    use_json,
)
from fsdptoys.utils.sealed_folder import FileSum
from tests.harness.ranks import run_ranks


def sent(value: Any) -> Any:
    file = io.BytesIO()
    JsonWriter(file).dump(value)
    return JsonReader(io.BytesIO(file.getvalue())).load()


def plan() -> SavePlan:
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size([0, 3]), torch.Size([2, 3])),
        TensorProperties(
            torch.bfloat16, torch.strided, True, torch.contiguous_format, False
        ),
        torch.Size([4, 6]),
    )
    return SavePlan(
        [
            WriteItem(
                MetadataIndex("a.b", [0, 3], 1), WriteItemType.SHARD, tensor_data=data
            )
        ],
        planner_data=None,
    )


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            3,
            -(2**70),
            0.1,
            float("inf"),
            "ä\n\x1b",
            os.fsdecode(b"\xff"),
            b"\x00\xff",
            [],
            (),
            {},
            set(),
        ),
        Path("a b/ä"),
        [(1, "a"), {"b": [None], (1, 2): b"c"}, {3, 4}, torch.Size([2, 3])],
        {
            "exp_avg": (torch.float32, True),
            "layout": (torch.strided, torch.preserve_format),
        },
        ({"tensors-00001.safetensors": FileSum(4, "ab")}, None),
        {
            "a.b": StoredTensor(
                "BF16", (4, 6), (Chunk("file", "a.b@0,3", (0, 3), (4, 3)),)
            )
        },
        plan(),
        fsdp1.StateInfo(
            {"a": fsdp1._PosDimTensorInfo(torch.Size([2]), torch.float32)}, {}, {}
        ),
    ],
    ids=repr,
)
def test_objects_arrive_equal_with_the_same_type(value: Any) -> None:
    """Oracle: the object itself."""
    arrived = sent(value)
    assert arrived == value and type(arrived) is type(value)


@pytest.mark.parametrize(
    "error, expected",
    [
        (ConfigError("a=1 must be 2; set a=2"), ConfigError("a=1 must be 2; set a=2")),
        (
            FileNotFoundError(errno.ENOENT, "gone", "x"),
            FileNotFoundError(errno.ENOENT, "gone", "x"),
        ),
        (OSError(errno.ENOSPC, "full"), OSError(errno.ENOSPC, "full")),
        (KeyboardInterrupt(), KeyboardInterrupt("")),
        (
            json.JSONDecodeError("bad", "x", 0),
            ValueError("json.decoder.JSONDecodeError: bad: line 1 column 1 (char 0)"),
        ),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "start"), UnicodeError),
        (
            dist.DistBackendError("gone"),
            RuntimeError("torch.distributed.DistBackendError: gone"),
        ),
    ],
    ids=repr,
)
def test_exceptions_arrive_with_their_class_or_its_builtin_base(
    error: BaseException, expected: Any
) -> None:
    """Oracle: class and message."""
    arrived = sent(error)
    if isinstance(expected, type):
        assert type(arrived) is expected
    else:
        assert (type(arrived), str(arrived)) == (type(expected), str(expected))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.ones(2, 3, dtype=torch.bfloat16).t(),
        torch.zeros(0, 2),
        torch.tensor([True]),
    ],
)
def test_tensors_arrive_bitwise_equal(tensor: torch.Tensor) -> None:
    """Oracle: the tensor itself."""
    arrived = sent(tensor)
    assert (
        arrived.dtype == tensor.dtype
        and arrived.shape == tensor.shape
        and torch.equal(arrived, tensor)
    )


def test_checkpoint_failures_arrive_with_rank_and_stack_frame() -> None:
    """Oracle: the sent objects, which torch.distributed.checkpoint prints."""
    from torch.distributed.checkpoint.api import CheckpointException

    stack = traceback.StackSummary.from_list([("f.py", 3, "f", "x = 1")])
    arrived = sent(
        CheckpointException("write", {1: (OSError(errno.EIO, "broken"), stack)})
    )
    error, frames = arrived.failures[1]
    assert (
        error.errno,
        frames[0].filename,
        frames[0].lineno,
        list(arrived.failures),
    ) == (
        errno.EIO,
        "f.py",
        3,
        [1],
    )


class Runs:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


FOREIGN = [
    *(
        b"",
        b"null null",
        b"{}",
        b"[[[",
        b"[" * 100_000,
        b"\xff",
        b'["nothing"]',
        b'["dict",1]',
        b'["set",["list"]]',
    ),
    *(
        b'["torch","load"]',
        b'["torch","float32","x"]',
        b'["bytes","?"]',
        b'["text","?"]',
        b'["os error","x","y",null]',
    ),
    *(b'["error","os","system","true"]', b'["error","builtins","exec","1"]'),
    b'["error","fsdptoys.errors","ConfigError",1,2]',
    b'["enum","fsdptoys.config.schema","Config","x"]',
    b'["object","os","system","true"]',
    b'["tensor",["torch","float32"],[1000000000000],"AAAA"]',
    b'["tensor",["torch","float32"],[1000000000000],""]',
    b'["tensor",["list"],[1],"AAAA"]',
    b'["object","fsdptoys.train.object_collectives","JsonReader"]',
    b'["object","fsdptoys.errors","ConfigError"]',
    b'["object","fsdptoys.cli.main","os"]',
    b'["object","torch.distributed.fsdp._optim_utils","dataclasses"]',
    b'["object","torch.distributed.fsdp._optim_utils","StateInfo",["__class__",1]]',
]


@pytest.mark.parametrize("message", FOREIGN, ids=lambda message: repr(message[:50]))
def test_malformed_messages_are_refused(message: bytes) -> None:
    """Oracle: one error class, and no other object."""
    with pytest.raises(
        WireError, match="received an object that no rank of this run has sent"
    ):
        JsonReader(io.BytesIO(message)).load()


@pytest.mark.parametrize(
    "value",
    [object(), Runs("true"), os.system, torch.nn.Linear(1, 1), enum.Enum],
    ids=type,
)
def test_objects_of_unsupported_classes_are_not_sent(value: Any) -> None:
    """Oracle: an error at the sender, not at the receiver."""
    with pytest.raises(WireError, match="cannot be sent between ranks"):
        JsonWriter(io.BytesIO()).dump(value)


def receive_pickles(pwned: str) -> list[str]:
    """Rank 0 sends crafted bytes in place of each object; the others receive them."""
    torch_module: Any = dist.distributed_c10d
    if dist.get_rank() == 0:

        class Stranger(JsonWriter):
            def dump(self, value: Any) -> None:
                self._file.write(base64.b64decode(value))

        torch_module._pickler = Stranger
    evil = base64.b64encode(pickle.dumps(Runs(f"touch {pwned}"))).decode()
    heard = []
    gathered: list[Any] = [None, None]
    for collective in (
        lambda: dist.broadcast_object_list([evil], src=0),
        lambda: dist.all_gather_object(gathered, evil),
        lambda: dist.scatter_object_list(
            [None], [evil, evil] if dist.get_rank() == 0 else None, src=0
        ),
        lambda: dist.gather_object(
            evil, gathered if dist.get_rank() == 1 else None, dst=1
        ),
    ):
        try:
            collective()
            heard.append("nothing")
        except WireError:
            heard.append("refused")
    return heard


def test_use_json_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: no error with the debug level at which torch's functions ask for the backend of the
    group."""
    module: Any = dist.distributed_c10d
    monkeypatch.setattr(module, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    monkeypatch.setattr(module, "is_nccl_available", lambda: True)
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(module, name, getattr(module, name))
    use_json()
    assert (module._pickler, module._unpickler) == (JsonWriter, JsonReader)


def test_torch_without_replaceable_picklers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the expected message; without the check ranks would silently use pickles."""
    module: Any = dist.distributed_c10d
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(
        module,
        "_tensor_to_object",
        lambda tensor, size, group: pickle.loads(tensor.numpy()[:size]),
    )
    with pytest.raises(WireError, match="sends pickles between ranks"):
        use_json()


def test_pickle_of_another_rank_is_not_executed(tmp_path: Path) -> None:
    """Oracle: a file that the pickle would make; with torch's own collectives it does."""
    pwned = tmp_path / "pwned"
    _, heard = run_ranks(2, receive_pickles, str(pwned))
    assert heard == ["refused"] * 4
    assert not pwned.exists()
