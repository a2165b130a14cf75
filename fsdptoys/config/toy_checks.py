"""Check ``parallel=toy_cp`` and ``toy_ep`` against model, data, kernels and compilation."""

from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import ParallelConfig, ToyCPConfig, ToyEPConfig
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.mesh import MeshConfig


def check_toy_context(
    parallel: ParallelConfig,
    mesh: MeshConfig,
    model: ModelConfig,
    attention_kernel: str,
    seq_len: int,
    compiles: bool,
) -> None:
    """Check that a ring is asked for causal attention over full sequences only, in addition to ``check_context``.

    Args:
        parallel: settings of any strategy.
        mesh: resolved.
        model: settings of the model.
        attention_kernel: resolved value of ``kernels.attention``.
        seq_len: tokens of a full sequence.
        compiles: whether blocks are compiled.

    Raises:
        ConfigError: naming key, value and fix.
    """
    ranks = mesh.cp_size
    if ranks == 1 or not isinstance(parallel, ToyCPConfig):
        return
    if compiles:
        raise ConfigError(
            f"train.compile=true would compile the exchanges of parallel=toy_cp with mesh.cp_size={ranks}; "
            "set train.compile=false"
        )
    if parallel.context is ContextForm.ring:
        _check_ring(model, attention_kernel, seq_len)


def check_toy_experts(parallel: ParallelConfig, mesh: MeshConfig, compiles: bool) -> None:
    """Refuse compiled blocks, in addition to ``check_experts``.

    Raises:
        ConfigError: naming key, value and fix.
    """
    if mesh.ep_size > 1 and isinstance(parallel, ToyEPConfig) and compiles:
        raise ConfigError(
            f"train.compile=true would compile the exchanges of parallel=toy_ep with mesh.ep_size={mesh.ep_size}; "
            "set train.compile=false"
        )


def _check_ring(model: ModelConfig, attention_kernel: str, seq_len: int) -> None:
    chunk_len = getattr(model, "attention_chunk_len", None)
    wrong = {
        f"kernels.attention={attention_kernel}": attention_kernel != "torch",
        f"model.attention_chunk_len={chunk_len}": chunk_len is not None and chunk_len < seq_len,
    }
    for setting, is_set in wrong.items():
        if is_set:
            raise ConfigError(
                f"{setting} is not an option of parallel=toy_cp parallel.context=ring, which has causal attention "
                "of its own; set parallel.context=ulysses"
            )
