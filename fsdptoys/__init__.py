"""FSDPToys: train language models with FSDP1, FSDP2, HSDP, DDP or one process, chosen by
configuration."""

from pathlib import Path

__version__ = "0.1.0"

if (Path(__file__).parent / "models").is_file():
    # A checkout or zip whose symbolic links were unpacked as text files (Windows, Python's
    # zipfile): models, patches and configs are then found where the links point to, one folder up.
    __path__.append(str(Path(__file__).parent.parent))
