"""What software reaches of the peaks of hardware: the coefficients of `roofline`, usual ones, and those fitted to what
was published of some software (`tables/reached.toml`, made by `published`)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import NamedTuple

from .models import find


class Reached(NamedTuple):
    """What software gets out of a device. compute, compute_8bit, attention, memory, kv, link: shares of the peaks, of
    matrices, of those in 8 bits or less, of prompts' attention, of weights and of KV that are read, and of links.
    compute_4bit, memory_4bit: shares of the peak of 16 bits and of the memory's, of weights of 4 bits that are unpacked
    before they are multiplied; experts_4bit_s: overhead of each layer of experts of such weights.
    overlap: exponent that joins computing and reading: 1 adds them, infinity takes the longer. link_s: latency of a
    collective, for each doubling of its devices. step_s, layer_s, row_s: overheads. imbalance: tokens of the busiest
    device of experts, over the mean. shared: of the positions that rows share, what is read once only."""

    compute: float = 0.70
    compute_8bit: float = 0.50
    compute_4bit: float = 0.50
    attention: float = 0.40
    memory: float = 0.80
    memory_4bit: float = 0.55
    kv: float = 0.80
    link: float = 0.70
    overlap: float = 1.5
    link_s: float = 15e-6
    step_s: float = 0.002
    layer_s: float = 10e-6
    row_s: float = 10e-6
    experts_4bit_s: float = 100e-6
    imbalance: float = 1.2
    shared: float = 0.0


USUAL = Reached()


@cache
def reached_by_software() -> dict[str, Reached]:
    """By the software that they were fitted to, and `usual`."""
    text = resources.files(__package__).joinpath("tables/reached.toml").read_text(encoding="utf8")
    return {"usual": USUAL} | {name: USUAL._replace(**table) for name, table in tomllib.loads(text).items()}


def reached_named(name: str, where: str = "software") -> Reached:
    """Raises ConfigError, which names the field and the nearest names."""
    return find(name, reached_by_software(), where)
