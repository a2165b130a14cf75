"""A user's loss against options of the built-in one, and against layouts that it cannot have."""

from .rule import Rules

LOSS = Rules()

for _key in ("label_smoothing", "z_loss_coef"):
    LOSS.exclude(
        f"train.{_key}",
        "loss!=cross_entropy",
        unused=True,
        says=f"{{train.{_key}}} has no effect unless loss=cross_entropy; leave it out, or give "
        "{loss} an option for it",
    )
LOSS.exclude(
    "loss!=cross_entropy",
    "mesh.tp_size",
    says="{loss} takes the logits of all classes, of which a rank of {mesh.tp_size} has some; set "
    "loss=cross_entropy or mesh.tp_size=1",
)
LOSS.exclude(
    "loss!=cross_entropy",
    "train.deterministic=layout",
    says="{loss} has no form whose bits are the same on every layout; set loss=cross_entropy or "
    "train.deterministic=true",
)
LOSS.exclude(
    "memory.chunk_loss=true",
    "loss.takes_hidden_states=true",
    unused=True,
    says="memory.chunk_loss=true has no effect with {loss}, which computes the logits itself; set "
    "memory.chunk_loss=false",
)
