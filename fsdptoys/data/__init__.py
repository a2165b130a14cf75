"""Training data: a synthetic source, bytes of text, binary token files, and prepared folders of tokens.

``DataConfig.build`` returns a ``TokenDataset`` of numbered samples; ``BatchStream`` turns them into batches in an order
determined by the seed and the number of samples seen. ``prepare_folder`` turns text into a folder of
tokens; several folders can be mixed by weight. Not covered: reading over a network.
"""

from .bin import BinConfig, TokenDType
from .byte_text import TextConfig, decode_bytes, encode_bytes
from .dataset import IGNORE_INDEX, DataConfig, Samples, TextSample, TokenDataset
from .dataset_index import TOKENIZER_FILE, Index, check_folder, files_of, read_ends, read_index
from .document_reader import find_sources
from .hf import HFConfig
from .loader import check_shared_memory
from .prepare import MOST_PROCESSES, SHARD_TOKENS, Request, prepare_folder
from .prepared import PreparedConfig
from .progress import Display
from .sampler import BatchStream, eval_batches
from .synthetic import SyntheticConfig
from .text_encoder import open_encoder

DATASETS: dict[str, type[DataConfig]] = {
    kind.name: kind for kind in (SyntheticConfig, TextConfig, BinConfig, PreparedConfig, HFConfig)
}
"""Registry: the name after ``data=`` → the dataclass that ``configs/data/NAME.yaml`` starts from."""

__all__ = [
    "DATASETS",
    "IGNORE_INDEX",
    "MOST_PROCESSES",
    "SHARD_TOKENS",
    "TOKENIZER_FILE",
    "BatchStream",
    "BinConfig",
    "DataConfig",
    "Display",
    "HFConfig",
    "Index",
    "PreparedConfig",
    "Request",
    "Samples",
    "SyntheticConfig",
    "TextConfig",
    "TextSample",
    "TokenDType",
    "TokenDataset",
    "check_folder",
    "check_shared_memory",
    "decode_bytes",
    "encode_bytes",
    "eval_batches",
    "files_of",
    "find_sources",
    "open_encoder",
    "prepare_folder",
    "read_ends",
    "read_index",
]
