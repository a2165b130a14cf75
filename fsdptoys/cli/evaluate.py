"""``fsdptoys evaluate``: loss and perplexity of a trained model on a text or on its run's held-out
data.

fsdptoys evaluate runs/mine
fsdptoys evaluate runs/mine --text corpus.txt
fsdptoys evaluate DIR --text corpus.txt --context 2048 --json

A text is split into independent windows, as in training's evaluation: window i predicts tokens i·T
+ 1 to i·T + T, and the last window may be shorter, so that every token except the first is
predicted once. The first tokens of a window have little context, so a longer ``--context`` gives a
lower loss.

Without a text, the windows are the held-out samples of the run's data, in order and with the run's
labels. The data is opened by the run's settings; changes to its files since the run are not
detected.

Shapes: B windows, T tokens of a window.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fsdptoys.data import Samples
from fsdptoys.data.tokenizer import check_ids
from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.loss import build_loss
from fsdptoys.models import DecoderModel
from fsdptoys.train.evaluation import sum_losses
from fsdptoys.train.pretrained import TrainedModel, read_device
from fsdptoys.utils.text import print_status

from .commands import check_count, parse
from .evaluate_tasks import check_task_options, evaluate_tasks

Batch = tuple[Tensor, Tensor]
"""tokens_BT and labels_BT."""


@dataclass(frozen=True)
class Evaluation:
    """Loss of a model on a text."""

    loss: float
    """Mean over the predicted tokens, in nats."""
    perplexity: float
    """exp(loss)."""
    predicted_tokens: int
    context: int
    """Tokens of a window."""
    bits_per_byte: float | None
    """Total loss in bits per byte of the predicted text; None if the number of bytes is unknown."""


def evaluate_command(argv: Sequence[str]) -> int:
    """Run the command; return the exit status: 1 if the loss is not finite."""
    options = parse("evaluate", argv)
    sources = options.arguments
    check_count("evaluate", sources, 1, "one run or folder", "runs/NAME --text FILE")
    if options.text is None and options.tokenizer is not None:
        raise ConfigError(
            f"--tokenizer {options.tokenizer} encodes a text, and a run's held-out data is token "
            "ids already; leave it out, or write --text FILE"
        )
    if options.text is not None and options.windows is not None:
        raise ConfigError(
            f"--windows {options.windows} limits a run's held-out data, and --text "
            f"{options.text} is read to its end; leave one of them out"
        )
    check_task_options(options)
    device, dtype = read_device(options.device, options.dtype)
    if options.tasks is not None:
        return evaluate_tasks(options, sources[0], device, dtype)
    content = None
    if options.text is not None:
        try:
            content = Path(options.text).expanduser().read_bytes()
        except OSError as error:
            raise ConfigError(
                f"--text {options.text} cannot be read ({error.strerror or error}); name a file "
                "that can"
            ) from error

    trained = TrainedModel(sources[0], say=print_status, adapter=options.adapter)
    context = trained.choose_context(options.context)
    if content is None:
        evaluation = _evaluate_held_out(
            trained, context, options.windows, options.batch, device, dtype
        )
    else:
        tokenizer = trained.tokenizer(options.tokenizer)
        ids = tokenizer.encode_file(content, options.text)
        check_ids(ids, trained.config.vocab_size, options.text)
        if len(ids) < 2:
            raise ConfigError(
                f"{options.text} has {len(ids)} tokens, of which none can be predicted; give a "
                "longer text"
            )
        bytes_count = None
        if tokenizer.has_bytes:
            # A first byte alone may not decode to text; a special first id has no bytes.
            first = (
                1
                if len(ids) == len(content)
                else len(tokenizer.decode(ids[:1]).encode())
            )
            bytes_count = len(content) - first
        batches = _windows(ids, context, options.batch)
        evaluation = evaluate(
            trained.load(device, dtype), batches, context, device, bytes_count
        )
    if options.json:
        values = {
            key: value if value is None or math.isfinite(value) else None
            for key, value in asdict(evaluation).items()
        }
        print(json.dumps(values, indent=2))
    else:
        print(_describe(evaluation))
    return int(not math.isfinite(evaluation.loss))


def evaluate(
    model: DecoderModel,
    batches: Iterable[Batch],
    context: int,
    device: Device,
    bytes_count: int | None,
) -> Evaluation:
    """Evaluate a model on batches.

    Args:
        model: on ``device``.
        context: tokens of a window, for the result.
        device: device of the model.
        bytes_count: bytes of the predicted tokens, or None if unknown.
    """
    # on the host, since not every device has float64
    zero = torch.zeros((), dtype=torch.float64)
    sums = sum_losses(
        model, build_loss(chunk_loss=True), batches, device.torch_device, zero
    )
    total = sums[0].item()
    predicted = int(sums[1])
    loss = total / predicted if predicted else math.nan
    perplexity = (
        math.exp(loss) if loss < math.log(sys.float_info.max) else loss * math.inf
    )
    bits = total / math.log(2) / bytes_count if bytes_count else None
    return Evaluation(loss, perplexity, predicted, context, bits)


def _windows(ids: Sequence[int], context: int, batch_size: int) -> Iterator[Batch]:
    """Yield batches of windows with all tokens except the first as labels; the last window may be
    shorter."""
    tokens_T = torch.tensor(ids, dtype=torch.int64)
    full = (len(ids) - 1) // context * context
    for start, end, width in (
        (0, full, context),
        (full, len(ids) - 1, len(ids) - 1 - full),
    ):
        if end > start:
            tokens_BT, labels_BT = (
                tokens_T[start + shift : end + shift].view(-1, width)
                for shift in (0, 1)
            )
            yield from zip(
                tokens_BT.split(batch_size), labels_BT.split(batch_size), strict=True
            )


def _evaluate_held_out(
    trained: TrainedModel,
    context: int,
    most: int | None,
    batch_size: int,
    device: Device,
    dtype: torch.dtype,
) -> Evaluation:
    """Evaluate a model on its run's held-out data, or the first ``most`` windows of it.

    Raises:
        ConfigError: if the run has no such data, or it cannot be opened.
    """
    data = trained.data()
    source = trained.source
    if data is None:
        raise ConfigError(
            f"there is no text to predict; write fsdptoys evaluate {source} --text FILE"
        )
    try:  # as the trainer does
        data.check_documents()
        data.validate(context, trained.config.vocab_size)
        data.prepare(context, trained.config.vocab_size)
        dataset = data.build(context, trained.config.vocab_size, trained.data_seed())
        if data.mask_documents:
            dataset.end_labels_with_documents()
    except ConfigError as error:  # its fix is about training settings
        raise ConfigError(
            f"the held-out part of {source} cannot be opened in windows of {context} tokens "
            f"({str(error).partition('; ')[0]}); put the data back, write this where the run was "
            "started, or write --text FILE"
        ) from error
    if dataset.eval is None:
        raise ConfigError(
            f"{source} held nothing out of data={data.name}; write --text FILE"
        )
    count = min(most or len(dataset.eval), len(dataset.eval))
    print_status(
        f"predicting {count:,} of the {len(dataset.eval):,} held-out windows of data={data.name}"
    )
    model = trained.load(device, dtype)
    if data.mask_documents:
        model.document_end = dataset.document_end
    evaluation = evaluate(
        model, _held_out(dataset.eval, count, batch_size), context, device, None
    )
    with suppress(ConfigError):  # a missing tokenizer file is not needed here
        if data.find_tokenizer() == "bytes":
            return replace(evaluation, bits_per_byte=evaluation.loss / math.log(2))
    return evaluation


def _held_out(samples: Samples, count: int, batch_size: int) -> Iterator[Batch]:
    """Yield the first samples in batches."""
    for first in range(0, count, batch_size):
        rows = [
            samples[index] for index in range(first, min(first + batch_size, count))
        ]
        tokens_BT, labels_BT = (
            torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True)
        )
        yield tokens_BT, labels_BT


def _describe(evaluation: Evaluation) -> str:
    facts = {
        "loss": f"{evaluation.loss:.6f} nats per token",
        "perplexity": f"{evaluation.perplexity:.4f}",
        "tokens": (
            f"{evaluation.predicted_tokens:,} predicted, in windows of {evaluation.context:,}"
        ),
        "bits per byte": "unknown, since the ids are not bytes",
    }
    if evaluation.bits_per_byte is not None:
        facts["bits per byte"] = f"{evaluation.bits_per_byte:.6f}"
    return "\n".join(f"{label:<15}{value}" for label, value in facts.items())
