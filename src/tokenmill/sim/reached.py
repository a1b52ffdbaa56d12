"""What software reaches of the peaks of hardware: the coefficients of `roofline`, usual ones, and those fitted to what
was published of some software (`tables/reached.toml`, made by `published`)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import NamedTuple

from .hardware import Hardware
from .models import ModelShape, find


class Reached(NamedTuple):
    """What software gets out of a device. compute, compute_8bit, attention, memory, kv, link: shares of the peaks, of
    matrices, of those in 8 bits or less, of prompts' attention, of weights and of KV that are read, and of links.
    compute_4bit, memory_4bit: shares of the peak of 16 bits and of the memory's, of weights of 4 bits that are unpacked
    before they are multiplied; experts_4bit_s: overhead of each layer of experts of such weights.
    overlap: exponent that joins computing and reading: 1 adds them, infinity takes the longer. link_s: latency of a
    collective, for each doubling of its devices. step_s, layer_s, row_s: overheads. imbalance: tokens of the busiest
    device of experts, over the mean. shared: of the positions that rows share, what is read once only.

    error_low, error_high: of num_held_out predictions of published points that nothing was fitted to, 8 of 10 errors
    lie between them; an error is the predicted time over the published one, less 1."""

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
    error_low: float = 0.0
    error_high: float = 0.0
    num_held_out: int = 0

    @property
    def doubt(self) -> str:
        """How far a predicted time may be off, in words."""
        if not self.num_held_out:
            return "not held against published times"
        return (
            f"8 of 10 predicted times are {self.error_low:+.0%} to {self.error_high:+.0%} off what is published "
            f"({self.num_held_out} held out)"
        )


USUAL = Reached()


DENSE, EXPERTS = "dense", "experts"


class Cell(NamedTuple):
    """What coefficients of one software may differ by: the generation of the hardware and the family of the model. Both
    are empty for those of the software as a whole."""

    generation: str = ""
    family: str = ""


def cell_of(hardware: Hardware, model: ModelShape) -> Cell:
    return Cell(hardware.generation, EXPERTS if model.num_experts else DENSE)


_WHOLE = {"tensorrt-llm": "tensorrt-llm-0.6"}
"""Software whose coefficients are known of some generations only -> whose are taken elsewhere."""
_USUAL_CELLS = {
    Cell("blackwell", DENSE): USUAL._replace(compute_8bit=0.33, memory=0.65),
    Cell("blackwell", EXPERTS): USUAL._replace(compute_8bit=0.2, attention=0.2, row_s=20e-6),
}
"""Of the peaks of Blackwell less is reached: about as much less as TensorRT-LLM reaches there than on Hopper."""


@cache
def reached_by_software() -> dict[str, dict[Cell, Reached]]:
    """By the software that they were fitted to, and `usual`; each has the empty cell."""
    text = resources.files(__package__).joinpath("tables/reached.toml").read_text(encoding="utf8")
    found: dict[str, dict[Cell, Reached]] = {"usual": {Cell(): USUAL, **_USUAL_CELLS}}
    for name, table in tomllib.loads(text).items():
        cells = found.setdefault(name, {})
        for generation, families in table.items():
            if isinstance(families, dict):
                for family, values in families.items():
                    cells[Cell(generation, family)] = USUAL._replace(**values)
        values = {key: value for key, value in table.items() if not isinstance(value, dict)}
        if values:
            cells[Cell()] = USUAL._replace(**values)
    for name, whole in _WHOLE.items():
        found[name][Cell()] = found[whole][Cell()]
    return found


def reached_named(name: str, cell: Cell, where: str = "software") -> Reached:
    """Of a software, for such hardware and models, or as a whole where nothing is known of these. Raises ConfigError,
    which names the field and the nearest names."""
    cells = find(name, reached_by_software(), where)
    return cells.get(cell) or cells[Cell()]
