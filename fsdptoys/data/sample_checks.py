"""Check samples that own code reads, before a run trains on them."""

import numpy as np

from fsdptoys.errors import ConfigError

from .dataset import IGNORE_INDEX, DataConfig, Samples, TokenDataset


def check_dataset(
    dataset: TokenDataset, config: DataConfig, seq_len: int, vocab_size: int
) -> None:
    """Check the first and the last sample of each part, and that all parts are there.

    Raises:
        ConfigError: naming the class to correct.
    """
    if config.has_eval != (dataset.eval is not None):
        raise ConfigError(
            f"data={config.name} has the property has_eval={config.has_eval} and "
            f"{'no' if dataset.eval is None else 'a'} held-out part; let "
            f"{type(config).__name__}.has_eval say what build returns"
        )
    if config.mask_documents and dataset.document_end is None:
        raise ConfigError(
            f"data.mask_documents=true needs the id that ends a document; set document_end in "
            f"{type(dataset).__name__}, or knows_document_end to False"
        )
    for samples in (dataset.train, dataset.eval):
        if samples is not None:
            _check_samples(samples, config.name, seq_len, vocab_size)


def _check_samples(samples: Samples, name: str, seq_len: int, vocab_size: int) -> None:
    reader = f"{type(samples).__name__}.read of data={name}"
    if len(samples) < 1:
        raise ConfigError(
            f"{type(samples).__name__} of data={name} has no samples; give it some"
        )
    for index in dict.fromkeys((0, len(samples) - 1)):
        for noun, ids, ignored in zip(
            ("tokens", "labels"), samples[index], ((), (IGNORE_INDEX,)), strict=True
        ):
            if not isinstance(ids, np.ndarray) or ids.dtype != np.int64:
                kind = getattr(ids, "dtype", type(ids).__name__)
                raise ConfigError(
                    f"{reader} returns {noun} of type {kind}; return NumPy arrays of int64"
                )
            if ids.shape != (seq_len,):
                raise ConfigError(
                    f"{reader} returns {noun} of shape {ids.shape}; return "
                    f"train.seq_len={seq_len} of them"
                )
            valid = (ids >= 0) & (ids < vocab_size) | np.isin(ids, ignored)
            if not valid.all():
                raise ConfigError(
                    f"{reader} returns {noun} with the id {ids[~valid][0]}; return ids from 0 to "
                    f"{vocab_size - 1}, below model.vocab_size"
                )
