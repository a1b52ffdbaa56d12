"""`inspect --expert-load FILE`: which experts did the work, as a map for the terminal.

A line for each layer, a character for each expert, or for a few neighbours where there are more than fit:

    layer  1  ▂▂▄▁▂  ▂█▂  even 0.41  unused 2  most 9 (14%), 4 (7%), 0 (5%)

A character is as high as its expert's share, eight eighths being twice the mean or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.experts import balancedness, num_unused
from .expert_load import LoadFile

WIDTH = 64
_LEVELS = " ▁▂▃▄▅▆▇█"
_FULL = 2.0
"""Times the mean, from which on a character is full."""
_NUM_BEST = 3


def draw_load(file: LoadFile) -> Iterator[str]:
    """The lines."""
    load = file.load
    num_experts = len(load.tokens[0])
    total = sum(map(sum, load.tokens))
    group = -(-num_experts // WIDTH)
    yield f"{'model':<14} {file.model}"
    yield f"{'numerics id':<14} {file.numerics_id}"
    yield f"{'counted':<14} {file.since} to {file.until}"
    yield f"{'experts':<14} {num_experts} in each of {len(load.layers)} layers"
    yield f"{'computed':<14} {total:,} rows times experts"
    evens = [balancedness(tokens) for tokens in load.tokens]
    worst = min(range(len(evens)), key=evens.__getitem__)
    mean = sum(evens) / len(evens)
    yield f"{'even':<14} {mean:.2f} on average; least {evens[worst]:.2f}, in layer {load.layers[worst]}"
    yield ""
    each = "an expert" if group == 1 else f"{group} experts"
    yield f"Each character is {each}: empty for no row at all, full for {_FULL:g} times the mean or more."
    for layer, tokens, even in zip(load.layers, load.tokens, evens, strict=True):
        best = sorted(range(num_experts), key=lambda expert: (-tokens[expert], expert))[:_NUM_BEST]
        whole = sum(tokens)
        shown = ", ".join(f"{expert} ({tokens[expert] / whole:.0%})" for expert in best if tokens[expert])
        yield (
            f"layer {layer:>3}  {_bars(tokens, group)}  even {even:.2f}  unused {num_unused(tokens):>3}"
            f"  most {shown or 'none'}"
        )


def _bars(tokens: Sequence[int], group: int) -> str:
    """Of neighbours, by their mean."""
    mean = sum(tokens) / len(tokens)
    parts = [tokens[first : first + group] for first in range(0, len(tokens), group)]
    return "".join(_bar(sum(part) / len(part), mean) for part in parts)


def _bar(value: float, mean: float) -> str:
    """Anything above nothing is shown."""
    if not value:
        return _LEVELS[0]
    top = len(_LEVELS) - 1
    return _LEVELS[max(1, min(top, round(top * value / (_FULL * mean))))]
