"""Context parallelism: ``mesh.cp_size`` ranks share each sequence.

Every rank keeps 1/N of a sequence in all layers. Only attention mixes tokens, so only attention
communicates:

- ``ulysses`` (arXiv:2309.14509) exchanges heads for sequence before attention and back after it:
  each rank computes full sequences of H/N heads with the kernel of one rank. Activations stay at
  1/N. N must divide the query heads.
- ``gathered`` (arXiv:2407.21783, section 3.3.2) all-gathers keys and values, and computes the rows
  of its own queries. Any number of heads; keys and values of full sequences are in memory during a
  layer, few with grouped heads.
- ``ring`` (arXiv:2310.01889) passes keys and values from rank to rank, and merges partial results
  by their log-sum-exp. Any number of heads, and never more than two parts of other ranks' keys and
  values in memory.

The last two cut sequences into 2N pieces. Rank r keeps pieces r and 2N-1-r, a head and a tail, so
that all ranks compute equally many scores of the causal half.

Gradients of parameters are sums over a sequence's parts, which the strategy sums over ranks like
those of sequences. The collectives are part of the forward and backward of each attention, and
recomputation repeats them; all ranks of a group must run the same layers in the same order.
"""

from enum import Enum

import torch.distributed as dist

from fsdptoys.models import Context
from fsdptoys.models.context import Uncompiled

from .gathered import Gathered, HeadTail
from .ring import Ring
from .ulysses import Ulysses


class ContextForm(Enum):
    """Communication of attention under ``mesh.cp_size``."""

    auto = "auto"
    """``ulysses`` where the ranks divide the query heads, else ``gathered``."""
    ulysses = "ulysses"
    """All-to-all: each rank has full sequences of some heads."""
    gathered = "gathered"
    """All-gather of keys and values: each rank has some queries of all heads."""
    ring = "ring"
    """Keys and values pass from rank to rank; documents are not kept apart."""

    @property
    def pieces_per_rank(self) -> int:
        """Pieces of a sequence that a rank keeps."""
        return 1 if self is ContextForm.ulysses else 2


def build_context(
    form: ContextForm, group: dist.ProcessGroup, *, compiles: bool
) -> Context:
    """A context of a resolved form for the ranks of ``group``.

    ``compiles``: whether the compiler traces the model. It then skips attention: compiled backwards
    may order the exchange otherwise than FSDP's reductions on each rank, and ranks would wait for
    one another.
    """
    contexts: dict[ContextForm, type[Ulysses] | type[HeadTail]] = {
        ContextForm.ulysses: Ulysses,
        ContextForm.gathered: Gathered,
        ContextForm.ring: Ring,
    }
    context = contexts[form](group)
    return Uncompiled(context) if compiles else context
