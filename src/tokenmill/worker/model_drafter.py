"""What the runner and a drafter that computes know of each other: a step that has been computed goes in, drafts come
out (draft_model.py: a model of its own; draft_states.py: a layer that is given states of the target; draft_medusa.py:
heads that are).

    T tokens of a row in a step  D width of the target
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..core.step import Drafts, StepPlan
from ..models.decoder import AuxHiddenStates
from .draft_sequences import DraftSequences


@dataclass(frozen=True, slots=True, eq=False)
class AuxRows:
    """Hidden states of tokens of one row, float32 [T, D], one array for each that the drafter asked for. They are
    those of the drafts, too, where the row has some.

    row    its index in the plan
    start  position of the first token
    """

    row: int
    start: int
    states: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ComputedStep:
    """drawn       of each row the tokens that its sequence takes: one, and one for each draft that was right; () of a
                   row that draws none
    duration_s  what the step took without the drafter
    aux         hidden states of all its tokens, to be gone through once, before the next step; empty where the drafter
                asked for none. A row that was cut into pieces has an entry for each, in order
    """

    plan: StepPlan
    drawn: Sequence[tuple[int, ...]]
    duration_s: float
    aux: Iterable[AuxRows] = ()


class ModelDrafter(Protocol):
    """aux: hidden states of the target that it looks at; None: it takes none. kv: its own, of which nobody else knows;
    None: it keeps none. late_s: what the latest call took for tokens that it had missed. One thread calls it, that
    which computes steps."""

    @property
    def aux(self) -> AuxHiddenStates | None: ...

    @property
    def kv(self) -> DraftSequences | None: ...

    @property
    def late_s(self) -> float: ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def scratch_bytes(self) -> int | None: ...

    def propose(self, step: ComputedStep) -> dict[int, Drafts]:
        """What may follow the tokens that each row of a step has drawn, by row. To be called for every step that has
        not failed, in order."""
        ...
