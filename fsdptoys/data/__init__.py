"""Where tokens come from: a synthetic source, the bytes of text files, or binary token files; and their order.

``DataConfig.build`` gives a ``TokenDataset`` of numbered samples; ``BatchStream`` turns them into batches, in an order
that is a pure function of the seed and of the number of samples already seen. Not covered: mixtures of sources with
weights, masks between documents, tokenizers (a binary file holds what any of them made), reading over a network.
"""

from .bin import BinConfig, TokenDType
from .dataset import IGNORE_INDEX, DataConfig, Samples, TokenDataset
from .stream import BatchStream, eval_batches
from .synthetic import SyntheticConfig
from .text import BYTES, TextConfig, TextDataset, decode_bytes, encode_bytes

__all__ = [
    "BYTES",
    "IGNORE_INDEX",
    "BatchStream",
    "BinConfig",
    "DataConfig",
    "Samples",
    "SyntheticConfig",
    "TextConfig",
    "TextDataset",
    "TokenDType",
    "TokenDataset",
    "decode_bytes",
    "encode_bytes",
    "eval_batches",
]
