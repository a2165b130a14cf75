"""Settings of context parallelism that do not go together."""

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.parallel import FSDP2Config
from fsdptoys.parallel.context import ContextForm

REFUSED: dict[str, str] = {
    "parallel.context=ring": "parallel.context=ring has no effect with mesh.cp_size=1, where each rank has full "
    "sequences; set parallel.context=auto or mesh.cp_size=2",
    "mesh.cp_size=5": "mesh.cp_size=5 must divide the 12 ranks that share a copy of the parameters; set mesh.cp_size=4",
    "mesh.cp_size=2 mesh.fsdp_size=3 parallel=fsdp1": "mesh.cp_size=2 must divide the 3 ranks that share a copy of the "
    "parameters; set mesh.cp_size=1",
    "mesh.cp_size=6 parallel.context=ulysses train.seq_len=96": "parallel.context=ulysses shares heads among "
    "mesh.cp_size=6 ranks, which does not divide the 4 heads of the model; set parallel.context=gathered or "
    "mesh.cp_size=2",
    "mesh.cp_size=3 parallel.context=ulysses train.seq_len=96": "parallel.context=ulysses shares heads among "
    "mesh.cp_size=3 ranks, which does not divide the 4 heads of the model; set parallel.context=gathered",
    "mesh.cp_size=4 train.seq_len=66": "train.seq_len=66 must be a multiple of 4, the pieces into which "
    "parallel.context=ulysses cuts a sequence with mesh.cp_size=4; set train.seq_len=64",
    "mesh.cp_size=4 parallel.context=ring train.seq_len=68": "train.seq_len=68 must be a multiple of 8, the pieces "
    "into which parallel.context=ring cuts a sequence with mesh.cp_size=4; set train.seq_len=64 or "
    "parallel.context=ulysses",
    "mesh.cp_size=2 parallel.context=ring data.mask_documents=true": "parallel.context=ring does not keep documents "
    "apart, as data.mask_documents=true asks for; set parallel.context=auto or data.mask_documents=false",
    "mesh.cp_size=2 train.compile=true memory.gradient_checkpointing=selective": "memory.gradient_checkpointing="
    "selective cannot see into blocks compiled by train.compile=true with experts, units within a block, "
    "memory.activation_offload=true, or mesh.cp_size or mesh.tp_size above 1; set memory.gradient_checkpointing=full",
}
ON_CUDA: dict[str, str] = {
    "kernels.attention=flex parallel.context=ring": "kernels.attention=flex cannot compute the parts of a sequence of "
    "parallel.context=ring; set kernels.attention=torch or parallel.context=ulysses",
    "kernels.attention=cudnn parallel.context=gathered parallel.param_dtype=bfloat16": "kernels.attention=cudnn cannot "
    "compute the parts of a sequence of parallel.context=gathered; set kernels.attention=torch or "
    "parallel.context=ulysses",
    "kernels.attention=efficient parallel.context=ring": "kernels.attention=efficient cannot compute the parts of a "
    "sequence of parallel.context=ring; set kernels.attention=torch or parallel.context=ulysses",
    "kernels.document_attention=flex data.mask_documents=true parallel.context=gathered": "kernels.document_attention="
    "flex computes full sequences, of which parallel.context=gathered leaves each rank some rows; set "
    "kernels.document_attention=torch or parallel.context=ulysses",
    "kernels.attention=flash parallel.context=gathered parallel.param_dtype=bfloat16 model.dim=36 model.n_heads=6 "
    "model.n_kv_heads=6": "kernels.attention=flash takes heads whose width is a multiple of 8 with "
    "parallel.context=gathered, and those of this model have 6 channels; set kernels.attention=torch or "
    "parallel.context=ulysses",
}
PLAIN = ["experiment=null", "model=llama_debug"]


@pytest.mark.parametrize(("words", "sentence"), REFUSED.items())
def test_settings_that_cannot_share_sequences_are_refused(words: str, sentence: str) -> None:
    """Oracle: the sentence."""
    with pytest.raises(ConfigError) as mistake:
        compose_config([*PLAIN, *words.split()]).validate(12, "cpu")
    assert str(mistake.value) == sentence


@pytest.mark.parametrize(("words", "sentence"), ON_CUDA.items())
def test_kernels_that_cannot_compute_parts_are_refused(words: str, sentence: str) -> None:
    """Oracle: the sentence; the exchange of heads takes the same kernels, since it computes full sequences."""
    words = f"mesh.cp_size=2 {words}"
    with pytest.raises(ConfigError) as mistake:
        compose_config([*PLAIN, *words.split()]).validate(12, "cuda")
    assert str(mistake.value) == sentence
    exchanged = [word for word in words.split() if not word.startswith("parallel.context=")]
    compose_config([*PLAIN, *exchanged, "parallel.context=ulysses"]).validate(12, "cuda")


@pytest.mark.parametrize(
    ("cp_size", "form"), [(2, ContextForm.ulysses), (4, ContextForm.ulysses), (6, ContextForm.gathered)]
)
def test_heads_are_exchanged_where_ranks_divide_them(cp_size: int, form: ContextForm) -> None:
    """Oracle: four heads."""
    config = compose_config([*PLAIN, f"mesh.cp_size={cp_size}", "train.seq_len=96"])
    config.validate(12, "cpu")
    assert isinstance(config.parallel, FSDP2Config) and config.parallel.context is form
