"""``fsdptoys evaluate``: loss and perplexity of a trained model on a text.

fsdptoys evaluate runs/mine --text corpus.txt
fsdptoys evaluate DIR --text corpus.txt --context 2048 --json

The text is cut into windows that the model reads each by itself, as held-out text is in training: window i predicts
the tokens i·T + 1 to i·T + T, and the last window may be shorter, so that all tokens but the first are predicted once.
The first tokens of a window have little before them, so a longer ``--context`` gives a lower loss.

Shapes: B windows, T tokens of one.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .device import Device
from .errors import ConfigError
from .memory import build_loss
from .models import DecoderModel
from .options import read_integer, refuse_unknown, take_options
from .tokens import Tokenizer, check_ids
from .trained import OPTIONS, TrainedModel, read_device

VALUES = {"--text": "FILE", "--batch": "8", **OPTIONS}


@dataclass(frozen=True)
class Evaluation:
    """How well a model foretells a text."""

    loss: float
    """Mean over the predicted tokens, in nats."""
    perplexity: float
    """exp of it."""
    predicted_tokens: int
    context: int
    """Tokens of a window."""
    bits_per_byte: float | None
    """Sum of the losses in bits over the bytes that the predicted tokens stand for; None where they stand for none."""


def run_evaluate(words: Sequence[str]) -> int:
    """Run the command.

    Args:
        words: as typed after it.

    Returns:
        Exit status: 1 where the loss is not finite.

    Raises:
        ConfigError: for the first mistake, before anything is allocated.
    """
    places, options = take_options(words, ["--json"], VALUES)
    refuse_unknown("evaluate", places, ["--json", *VALUES])
    if len(places) != 1:
        given = "none was given" if not places else f"{len(places)} were given"
        raise ConfigError(
            f"fsdptoys evaluate needs one run or folder, and {given}; write fsdptoys evaluate runs/NAME --text FILE"
        )
    if "--text" not in options:
        raise ConfigError(f"there is no text to predict; write fsdptoys evaluate {places[0]} --text FILE")
    batch_size = read_integer(options, "--batch", 1, least=1)
    typed = read_integer(options, "--context", 0, least=1) or None
    device, dtype = read_device(options)
    content = _read(options["--text"])

    trained = TrainedModel(places[0], say=lambda sentence: print(f"fsdptoys: {sentence}", file=sys.stderr))
    context = trained.choose_context(typed)
    tokenizer = trained.tokenizer(options.get("--tokenizer"))
    ids = tokenizer.encode_file(content, options["--text"])
    check_ids(ids, trained.config.vocab_size, options["--text"])
    if len(ids) < 2:
        raise ConfigError(
            f"{options['--text']} has {len(ids)} tokens, of which none can be predicted; give a longer text"
        )
    found = evaluate(trained.load(device, dtype), ids, context, batch_size, device, _bytes_of(ids, content, tokenizer))
    if "--json" in options:
        values = {key: value if value is None or math.isfinite(value) else None for key, value in asdict(found).items()}
        print(json.dumps(values, indent=2))
    else:
        print(_told(found))
    return int(not math.isfinite(found.loss))


@torch.no_grad()
def evaluate(
    model: DecoderModel, ids: Sequence[int], context: int, batch_size: int, device: Device, bytes_count: int | None
) -> Evaluation:
    """Have a model predict all tokens of a text but the first.

    Args:
        model: on ``device``.
        ids: of the text, at least two.
        context: tokens of a window.
        batch_size: windows at a time.
        device: where it runs.
        bytes_count: that the predicted tokens stand for, if they do.
    """
    tokens_T = torch.tensor(ids, dtype=torch.int64)
    predicted = len(ids) - 1
    full = predicted // context * context
    parts = [(tokens_T[:full].view(-1, context), tokens_T[1 : full + 1].view(-1, context))]
    parts.append((tokens_T[None, full:-1], tokens_T[None, full + 1 :]))
    loss_fn, total = build_loss(chunk_loss=True), 0.0
    for tokens_BT, labels_BT in parts:
        for piece_BT, wanted_BT in zip(tokens_BT.split(batch_size), labels_BT.split(batch_size), strict=True):
            if piece_BT.numel():
                total += float(model(piece_BT.to(device.torch_device), wanted_BT.to(device.torch_device), loss_fn))
    loss = total / predicted
    perplexity = math.exp(loss) if loss < math.log(sys.float_info.max) else loss * math.inf
    bits = total / math.log(2) / bytes_count if bytes_count else None
    return Evaluation(loss, perplexity, predicted, context, bits)


def _bytes_of(ids: Sequence[int], content: bytes, tokenizer: Tokenizer) -> int | None:
    """Bytes that all tokens but the first stand for."""
    if not tokenizer.has_bytes:
        return None
    # A first byte by itself may be no text, a first special id stands for none.
    first = 1 if len(ids) == len(content) else len(tokenizer.decode(ids[:1]).encode())
    return len(content) - first


def _read(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"--text {path} cannot be read ({error.strerror or error}); name a file that can") from error


def _told(found: Evaluation) -> str:
    facts = {
        "loss": f"{found.loss:.6f} nats a token",
        "perplexity": f"{found.perplexity:.4f}",
        "tokens": f"{found.predicted_tokens:,} predicted, in windows of {found.context:,}",
        "bits a byte": "not known, since ids stand for no bytes"
        if found.bits_per_byte is None
        else f"{found.bits_per_byte:.6f}",
    }
    return "\n".join(f"{label:<12}{value}" for label, value in facts.items())
