"""What the compiler did, in one line and in rows."""

from fsdptoys.compilation import Compilations

SHOWN = 20
"""Rows of a table at most."""


def compilation_line(compilation: Compilations) -> str:
    """How much was compiled, how long it took, what happened again."""
    again = [each for each in compilation.again if not each.at_limit]
    given_up = len(compilation.again) - len(again)
    breaks = sum(compilation.graph_breaks.values())
    line = f"compiled {compilation.compiled} function{'s' * (compilation.compiled != 1)} in {compilation.seconds:.1f} s"
    if again:
        which = "the last" if len(again) > 1 else "that"
        line += f" ({len(again)} of them again, {which} in {again[-1].phase}: {again[-1].reason})"
    line += f", {breaks} graph break{'s' * (breaks != 1)}"
    if breaks:
        line += f" ({max(compilation.graph_breaks, key=lambda reason: compilation.graph_breaks[reason])})"
    if given_up:
        line += f"; gave up {given_up} time{'s' * (given_up != 1)}, and went on in eager mode"
    return line


def again_rows(compilation: Compilations) -> list[tuple[str, str, str, str]]:
    """Step, phase, function and reason of what was compiled again."""
    rows = []
    for each in compilation.again[:SHOWN]:
        reason = each.reason.replace("`", "'")
        rows.append((str(each.step), each.phase, f"`{each.function}`", f"`{reason}`" + " — given up" * each.at_limit))
    more = len(compilation.again) - SHOWN
    return rows + ([("…", "", "", f"{more} more")] if more > 0 else [])
