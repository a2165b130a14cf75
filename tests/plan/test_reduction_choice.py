"""The planner's choice of ``parallel.reduce_each_microbatch``."""

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.device.profile import load_hardware
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.search.advice import advise
from fsdptoys.plan.search.combinations import SENSIBLE
from fsdptoys.plan.search.search import search
from fsdptoys.plan.search.switches import count_parameters

WORDS = ["model=llama_debug", "model.dim=512", "model.n_layers=2", "parallel=fsdp2",
         "train.seq_len=32", "memory=lean", "train.batch_size=1", "train.grad_accum=2",
         "data=synthetic", "mesh.fsdp_size=-1", "parallel.wrap=block",
         "parallel.reshard_after_forward=default"]  # fmt: skip
EACH = "parallel.reduce_each_microbatch=true"


@pytest.mark.usefixtures("unmeasured")
def test_gradients_whole_between_micro_batches_are_planned_searched_and_advised() -> (
    None
):
    """Oracle: seven eighths of the gradients' float32 bytes: other ranks' shards."""
    hardware = load_hardware("h100")
    base = compose_config(WORDS)
    reducing = compose_config([*WORDS, EACH])
    for config in (base, reducing):
        config.validate(8, "cuda", 8)
    now = fast_estimate(base, hardware, 8)
    then = fast_estimate(reducing, hardware, 8)
    saved = now.memory.peak_bytes - then.memory.peak_bytes
    assert saved == pytest.approx(7 / 8 * 4 * count_parameters(base.model), rel=0.25)

    limit = then.memory.reserved_bytes
    assert now.memory.reserved_bytes > limit
    result = search(
        compose_config(WORDS), WORDS, hardware, 8, limit, fast_estimate, space=SENSIBLE
    )
    assert all(EACH in candidate.overrides for candidate in result.candidates)
    advice = advise(base, lambda config: fast_estimate(config, hardware, 8), now, limit)
    assert (EACH,) in [change.overrides for change in advice if change.fits]
