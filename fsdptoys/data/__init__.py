"""Training data: a synthetic source, bytes of text, binary token files, prepared folders of tokens,
and conversations.

``DataConfig.build`` returns a ``TokenDataset`` of numbered samples; ``BatchStream`` turns them into
batches in an order determined by the seed and the number of samples seen. ``prepare_folder`` turns
text into a folder of tokens; several folders can be mixed by weight. Not covered: reading over a
network.
"""

from .bin import BinConfig as BinConfig
from .bin import TokenDType as TokenDType
from .byte_text import TextConfig as TextConfig
from .byte_text import decode_bytes as decode_bytes
from .byte_text import encode_bytes as encode_bytes
from .chat import ChatConfig as ChatConfig
from .chat_encoder import open_chat_encoder as open_chat_encoder
from .dataset import IGNORE_INDEX as IGNORE_INDEX
from .dataset import DataConfig as DataConfig
from .dataset import Samples as Samples
from .dataset import TextSample as TextSample
from .dataset import TokenDataset as TokenDataset
from .dataset_index import TOKENIZER_FILE as TOKENIZER_FILE
from .dataset_index import Index as Index
from .dataset_index import read_ends as read_ends
from .dataset_index import read_index as read_index
from .document_reader import find_sources as find_sources
from .hf import HFConfig as HFConfig
from .loader import check_shared_memory as check_shared_memory
from .prepare import MOST_PROCESSES as MOST_PROCESSES
from .prepare import SHARD_TOKENS as SHARD_TOKENS
from .prepare import Request as Request
from .prepare import prepare_folder as prepare_folder
from .prepared import PreparedConfig as PreparedConfig
from .progress import Display as Display
from .sampler import BatchStream as BatchStream
from .sampler import eval_batches as eval_batches
from .synthetic import SyntheticConfig as SyntheticConfig
from .text_encoder import open_encoder as open_encoder

DATASETS: dict[str, type[DataConfig]] = {
    kind.name: kind
    for kind in (
        SyntheticConfig,
        TextConfig,
        BinConfig,
        PreparedConfig,
        HFConfig,
        ChatConfig,
    )
}
"""Registry: the name after ``data=`` → the dataclass that ``configs/data/NAME.yaml`` starts
from."""
