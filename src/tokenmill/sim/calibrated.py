"""What one machine's steps take, as measured: a cost model of steps (`core.cost.CostModel`) that knows where it was
measured.

    duration = step + tokens(num_tokens) + rows(num_rows) + drawn(num_drawn)
             + position * (positions that the tokens attend to) + context * (positions that the rows read)
             + experts * (share of the experts that the tokens read)

where tokens, rows and drawn are 0 at 0, rise, and are straight between knots: a processor's kernels are bound by memory
for few tokens and by computing for many, with tiles between, so one slope fits neither end. Of a mixture of experts a
step reads those that its tokens choose (core.cost.read_share), more of them with each token but ever fewer more. Beside
it stand the time between steps, and what a front end and its clients take before and after. `tokenmill calibrate` fits
all of it to step logs and writes it to a file.

Asked for a step unlike any that was measured, the cost model answers, and `is_seen` says so.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

from ..core.cost import Work, read_share
from ..core.errors import ConfigError
from ..core.step_records import Machine
from .fields import Fields

FORMAT = "tokenmill calibration"
VERSION = 1
_CURVES, _LINES = ("tokens", "rows", "drawn"), ("gap", "front", "back")
_SECONDS = ("step_s", "position_s", "context_s", "crowded_s", "experts_s")
LEAST_SEEN = 3
"""Steps of a kind from which on it counts as seen."""
_SLACK, _SLACK_POSITIONS = 1.25, 32
"""How far beyond the contexts that were seen of a kind a step may be: so many times, and so many positions more."""


class Curve:
    """A function that is 0 at 0 and straight between `knots`, which rise; `slopes[i]` from knot i to the next one, the
    last one on and on, `slopes[0]` from 0."""

    def __init__(self, knots: Sequence[float], slopes: Sequence[float]) -> None:
        assert len(knots) == len(slopes) and knots[0] == 0, f"{len(knots)} knots, {len(slopes)} slopes"
        self.knots, self.slopes = tuple(knots), tuple(slopes)
        heights, height = [0.0], 0.0
        for low, high, slope in zip(knots, knots[1:], slopes, strict=False):
            height += slope * (high - low)
            heights.append(height)
        self._heights = tuple(heights)

    def __call__(self, number: float) -> float:
        i = bisect_right(self.knots, number) - 1
        return self._heights[i] + self.slopes[i] * (number - self.knots[i])


def shares(knots: Sequence[float], number: float) -> list[float]:
    """Of `number`, what lies between each knot and the next: what a Curve's slopes multiply."""
    ends = (*knots[1:], float("inf"))
    return [max(0.0, min(number, high) - low) for low, high in zip(knots, ends, strict=True)]


class Kind(NamedTuple):
    """Steps alike: of at most 2**token_bits tokens and 2**row_bits rows, and more than half of each. num_steps that
    were measured; the least and most mean context of their rows."""

    token_bits: int
    row_bits: int
    num_steps: int
    least_context: float
    most_context: float


def kind_of(work: Work) -> tuple[int, int]:
    """token_bits and row_bits of a step."""
    return (max(1, int(work.num_tokens)) - 1).bit_length(), (max(1, int(work.num_rows)) - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Line:
    """base_s + each_s * number; num: how many observations say so, 0: none, and it is 0."""

    base_s: float = 0.0
    each_s: float = 0.0
    num: int = 0

    def __call__(self, number: float) -> float:
        return self.base_s + self.each_s * number


class Beside(NamedTuple):
    """What the front end and clients compute beside steps, in seconds of one core: for a request that comes, one that
    ends, a token that goes out, a step that is told (0 where every step is held up by that and has it in its own
    time). num: steps that say so, by how much longer they took; 0: it is not known."""

    request_s: float = 0.0
    end_s: float = 0.0
    token_s: float = 0.0
    step_s: float = 0.0
    num: int = 0

    def times(self, factor: float) -> Beside:
        request_s, end_s, token_s, step_s, num = self
        return Beside(factor * request_s, factor * end_s, factor * token_s, factor * step_s, num)


NOT_KNOWN = Beside()


class Error(NamedTuple):
    """Of a regime's held-out steps, predicted / measured - 1: the median, the median and the 90th percentile of its
    amount, the median of its amount at the speed that the machine had then, and that of all seconds together."""

    regime: str
    num_steps: int
    median: float
    median_abs: float
    p90_abs: float
    paced_abs: float
    total: float


@dataclass(frozen=True)
class Calibrated:
    """The cost model, and lines: `gap` of rows, `front` of prompt tokens, `back` of rows. `speed`: what it was scaled
    by. `crowded_s`: by how much a step takes longer beside steps of other engines that have all other cores: they take
    memory bandwidth and caches from each other. `experts_s`: for reading all experts, of which a token chooses the
    share `machine.chosen_experts`."""

    machine: Machine
    step_s: float
    position_s: float
    context_s: float
    tokens: Curve
    rows: Curve
    drawn: Curve
    seen: tuple[Kind, ...] = ()
    gap: Line = Line()
    front: Line = Line()
    back: Line = Line()
    errors: tuple[Error, ...] = ()
    speed: float = 1.0
    beside: Beside = NOT_KNOWN
    crowded_s: float = 0.0
    experts_s: float = 0.0
    _kinds: Mapping[tuple[int, int], Kind] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kinds = {each[:2]: each for each in self.seen if each.num_steps >= LEAST_SEEN}
        object.__setattr__(self, "_kinds", kinds)

    def predict(self, work: Work) -> float:
        """Seconds that the step computes."""
        num_rows, num_tokens, num_positions, num_context, num_drawn, _ = work
        experts_s = self.experts_s
        if experts_s:
            experts_s *= read_share(self.machine.chosen_experts, num_tokens)
        return (
            self.step_s
            + experts_s
            + self.tokens(num_tokens)
            + self.rows(num_rows)
            + self.drawn(num_drawn)
            + self.position_s * num_positions
            + self.context_s * num_context
        ) * self.speed

    def is_seen(self, work: Work) -> bool:
        """Whether such steps were measured: some of the same kind, or of those that it lies between, with contexts
        about as long or short."""
        token_bits, row_bits = kind_of(work)
        kinds = self._kinds
        near = kinds.get((token_bits, row_bits))
        if near is not None:
            return _holds(work, near)
        for d_tokens, d_rows in ((1, 0), (0, 1)):
            below = kinds.get((token_bits - d_tokens, row_bits - d_rows))
            above = kinds.get((token_bits + d_tokens, row_bits + d_rows))
            if below is not None and above is not None and (_holds(work, below) or _holds(work, above)):
                return True
        return False

    def gap_s(self, work: Work) -> float:
        """Seconds from the end of the step before, or from the planning of this one, that it does not compute."""
        return self.gap(work.num_rows) * self.speed

    def held_up_s(self, arrived: float, ended: float, handed: float, told: float = 0.0) -> float:
        """Seconds by which a step is held up, where all cores are taken, by so many requests that come, that end,
        tokens that go out and steps that are told: front end and clients take them from all cores alike."""
        request_s, end_s, token_s, step_s, _ = self.beside
        computed_s = request_s * arrived + end_s * ended + token_s * handed + step_s * told
        return computed_s / sharing_of(self.machine) * self.speed

    @property
    def crowd_s(self) -> float:
        """`crowded_s`, at its speed."""
        return self.crowded_s * self.speed

    def beside_threads(self, threads: int) -> Self:
        """With the front end beside steps of so many threads. These go in lockstep: one that has to share its core
        holds all of them up, which says what is taken from one core, for each thread of a step."""
        share = threads / max(1, self.machine.threads)
        return replace(self, beside=self.beside.times(share))

    # ---- as a FrontCostModel (`parts`) ----

    def front_s(self, num_prompt_tokens: int) -> float:
        line_s, beside = self.front(num_prompt_tokens), self.beside
        return (min(line_s, beside.request_s) if beside.num else line_s) * self.speed

    def front_delay_s(self, num_prompt_tokens: int) -> float:
        return self.front(num_prompt_tokens) * self.speed - self.front_s(num_prompt_tokens)

    def back_s(self, num_rows: int) -> float:
        _, _, token_s, step_s, num = self.beside
        return (step_s + token_s * num_rows if num else self.back(num_rows)) * self.speed

    def back_delay_s(self) -> float:
        _, _, token_s, step_s, num = self.beside
        return max(0.0, self.back(1) - step_s - token_s) * self.speed if num else 0.0

    def end_s(self) -> float:
        """With what a request that came left to do when the engine had it."""
        request_s, end_s, *_, num = self.beside
        return (end_s + max(0.0, request_s - self.front(0))) * self.speed if num else 0.0

    def scaled(self, factor: float) -> Self:
        """Of a machine on which all takes `factor` times as long."""
        if not factor > 0:
            raise ConfigError(f"The factor must be above 0, got {factor}.", param="factor")
        return replace(self, speed=self.speed * factor)

    def to_json(self) -> str:
        cost_model: dict[str, Any] = {name: getattr(self, name) for name in _SECONDS}
        for name in _CURVES:
            curve: Curve = getattr(self, name)
            cost_model[name] = [
                {"over": knot, "slope_s": slope} for knot, slope in zip(curve.knots, curve.slopes, strict=True)
            ]
        whole = {
            "format": FORMAT,
            "version": VERSION,
            "speed": self.speed,
            "machine": asdict(self.machine),
            "law": cost_model,
        }
        whole |= {name: asdict(getattr(self, name)) for name in _LINES}
        whole |= {"beside": self.beside._asdict()}
        whole |= {"seen": [each._asdict() for each in self.seen], "errors": [each._asdict() for each in self.errors]}
        return json.dumps(whole, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "calibration") -> Self:
        """Raises ConfigError, which names the field; name: of the file."""
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            whole = None
        if not isinstance(whole, dict) or whole.get("format") != FORMAT:
            raise ConfigError(f"{name} is no calibration: write one by tokenmill calibrate.", param="calibration")
        if whole.get("version") != VERSION:
            told = f"{name} has version {whole.get('version')}; this build reads {VERSION}: calibrate again."
            raise ConfigError(told, param="version")
        try:
            return cls._read(Fields(whole))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error.message}", param=error.param) from error

    @classmethod
    def _read(cls, whole: Fields) -> Self:
        whole.text("format")
        whole.count("version")
        cost_model = whole.table("law")
        found = cls(
            machine=_machine(whole.table("machine")),
            step_s=cost_model.number("step_s"),
            position_s=cost_model.number("position_s"),
            context_s=cost_model.number("context_s"),
            crowded_s=cost_model.number("crowded_s", 0.0),
            seen=tuple(_kind(each) for each in whole.tables("seen")),
            errors=tuple(_error(each) for each in whole.tables("errors")),
            speed=whole.number("speed", is_open=True),
            tokens=_curve(cost_model, "tokens"),
            rows=_curve(cost_model, "rows"),
            drawn=_curve(cost_model, "drawn"),
            gap=_line(whole.table("gap")),
            front=_line(whole.table("front")),
            back=_line(whole.table("back")),
            beside=_beside(whole.table("beside")),
            experts_s=cost_model.number("experts_s", 0.0),
        )
        cost_model.end()
        whole.end()
        return found


def sharing_of(machine: Machine) -> int:
    """Over how many cores what front end and clients compute is spread, where all are taken: all that there are, or
    those of the step's threads where nobody knows how many there are."""
    return max(1, machine.cores or machine.threads)


def _holds(work: Work, kind: Kind) -> bool:
    context = work.num_context / max(1, work.num_rows)
    low = kind.least_context / _SLACK - _SLACK_POSITIONS
    return low <= context <= kind.most_context * _SLACK + _SLACK_POSITIONS


def _curve(cost_model: Fields, name: str) -> Curve:
    knots, slopes = [], []
    for each in cost_model.tables(name):
        knots.append(each.number("over"))
        slopes.append(each.number("slope_s"))
        each.end()
    if not knots or knots[0] != 0 or any(high <= low for low, high in pairwise(knots)):
        raise cost_model.error(name, "pieces are needed that begin over 0 and rise")
    return Curve(knots, slopes)


def _line(table: Fields) -> Line:
    line = Line(table.number("base_s"), table.number("each_s"), table.count("num"))
    table.end()
    return line


def _beside(table: Fields) -> Beside:
    request_s, end_s, token_s = (table.number(name) for name in Beside._fields[:3])
    found = Beside(request_s, end_s, token_s, table.number("step_s", 0.0), table.count("num"))
    table.end()
    return found


def _machine(table: Fields) -> Machine:
    machine = Machine(
        model=table.text("model"),
        numerics_id=table.text("numerics_id"),
        processor=table.text("processor"),
        isa=table.text("isa"),
        threads=table.count("threads"),
        block_size=table.count("block_size"),
        num_blocks=table.count("num_blocks"),
        max_num_seqs=table.count("max_num_seqs"),
        max_num_batched_tokens=table.count("max_num_batched_tokens"),
        chosen_experts=table.number("chosen_experts", most=1.0),
        cores=table.count("cores"),
    )
    table.end()
    return machine


def _kind(table: Fields) -> Kind:
    counts = (table.count(name) for name in Kind._fields[:3])
    kind = Kind(*counts, *(table.number(name) for name in Kind._fields[3:]))
    table.end()
    return kind


def _error(table: Fields) -> Error:
    shares = (table.number(name, least=-1.0) for name in Error._fields[2:])
    error = Error(table.text("regime"), table.count("num_steps"), *shares)
    table.end()
    return error
