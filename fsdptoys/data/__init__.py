"""Training data: numbered samples, in an order determined by the seed and the number of samples
seen.

``DATASETS`` is the registry of sources. ``DataConfig.build`` returns a ``TokenDataset`` of numbered
samples; ``BatchStream`` turns them into batches. ``prepare_folder`` turns text into a folder of
tokens; several folders can be mixed by weight. Not covered: reading over a network.
"""

from .chat_encoder import open_chat_encoder as open_chat_encoder
from .dataset import IGNORE_INDEX as IGNORE_INDEX
from .dataset import DataConfig as DataConfig
from .dataset import Samples as Samples
from .dataset import TokenDataset as TokenDataset
from .dataset_index import read_ends as read_ends
from .dataset_index import read_index as read_index
from .document_reader import find_sources as find_sources
from .loader import check_shared_memory as check_shared_memory
from .prepare import MOST_PROCESSES as MOST_PROCESSES
from .prepare import prepare_folder as prepare_folder
from .progress import Display as Display
from .registry import DATASETS as DATASETS
from .request import SHARD_TOKENS as SHARD_TOKENS
from .request import Request as Request
from .sample_checks import check_dataset as check_dataset
from .sampler import BatchStream as BatchStream
from .sampler import eval_batches as eval_batches
from .text_encoder import open_encoder as open_encoder
