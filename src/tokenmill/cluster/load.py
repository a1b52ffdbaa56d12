"""What an engine has to do, as its front end knows it without asking: prompts that wait, and choices that draw. Pure.

Engines tell of themselves after each step, but what was given since is not in that. So the books are kept here, from
what is given and what comes back; of an engine's own account only the prompt tokens that it has computed are taken, for
how far the prompts that it has not finished have come.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core.cost import Costs

_LATELY = 1 / 16
_USUAL = 256.0
"""Tokens of an answer, while none has ended."""


class Load:
    """Of one engine.

    num_waiting     requests that have no token of this engine yet
    num_to_compute  of their prompts, tokens that are not expected in the prefix cache
    num_positions   what these tokens attend to, summed
    num_drawing     requests that have
    num_context     tokens of those, as they were when they began
    num_output      of an answer, on average lately
    """

    __slots__ = (
        "_computed",
        "_settled",
        "_watchers",
        "num_context",
        "num_drawing",
        "num_output",
        "num_positions",
        "num_to_compute",
        "num_waiting",
    )  # fmt: skip

    def __init__(self, computed: int = 0) -> None:
        self.num_waiting = self.num_to_compute = self.num_drawing = self.num_context = 0
        self.num_positions = 0.0
        self.num_output = _USUAL
        self._watchers: list[Callable[[], None]] = []
        self._computed = self._settled = computed

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call it whenever what `pace` says may have changed."""
        self._watchers.append(watcher)

    def give(self, num_tokens: int, num_hit: int) -> None:
        """A request comes; so many of its tokens are expected in the prefix cache."""
        if not self.num_waiting:
            self._settled = self._computed
        self.num_waiting += 1
        self.num_to_compute += num_tokens - num_hit
        self.num_positions += positions(num_tokens - num_hit, num_hit)
        self._change()

    def start(self, num_tokens: int, num_hit: int, num_cached: int) -> None:
        """It has drawn its first token; so many of its tokens were cached indeed."""
        self._stop_waiting(num_tokens, num_hit)
        self._settled += num_tokens - num_cached
        self.num_drawing += 1
        self.num_context += num_tokens

    def end(self, num_tokens: int, num_hit: int, num_drawn: int) -> None:
        """It is over, here at least; `num_drawn`: tokens that it drew here."""
        if num_drawn:
            self.num_drawing -= 1
            self.num_context -= num_tokens
            self.num_output += _LATELY * (num_drawn - self.num_output)
            self._change()
        else:
            self._stop_waiting(num_tokens, num_hit)

    def step(self, computed: int) -> None:
        """The engine has computed so many prompt tokens in its life."""
        if self.num_waiting:
            self._change()
        self._computed = computed

    def note_costs(self) -> None:
        """Its steps are taken to cost something else."""
        self._change()

    @property
    def share_left(self) -> float:
        """Of what the waiting prompts have to compute."""
        done = min(max(0, self._computed - self._settled), self.num_to_compute)
        return 1 - done / self.num_to_compute if self.num_to_compute else 0.0

    def _change(self) -> None:
        for watcher in self._watchers:
            watcher()

    def _stop_waiting(self, num_tokens: int, num_hit: int) -> None:
        self.num_waiting -= 1
        self.num_to_compute -= num_tokens - num_hit
        self.num_positions -= positions(num_tokens - num_hit, num_hit)
        self._change()


def pace(
    load: Load, costs: Costs, step_tokens: int, num_rows: int, num_kv_tokens: int
) -> tuple[float, float, float, float]:
    """(base_s, token_s, position_s, each_s): `base_s` goes by before a prompt's own first token is computed, and to
    draw its first; then each of its tokens takes `token_s`, and `position_s` for each position that it attends to.
    `each_s`: a step without prompts.

    The engine's steps take at most `step_tokens`, and as many sequences as `num_rows` (0: any number); its KV pool
    holds `num_kv_tokens` (0: unknown). Every step also does what draws: that is how decodes slow prompts down."""
    context = load.num_context + load.num_drawing * load.num_output / 2
    each_s = costs.weights_s(load.num_drawing) + load.num_drawing * (costs.row_s + costs.token_s)
    each_s += (costs.position_s + costs.context_s) * context
    token_s = costs.token_s + (each_s / step_tokens if step_tokens else 0.0)
    waiting_s = token_s * load.num_to_compute + costs.position_s * load.num_positions
    base_s = load.share_left * waiting_s + costs.row_s * load.num_waiting + each_s
    over = 0.0
    num_open = load.num_waiting + load.num_drawing
    if num_rows and num_open >= num_rows:
        over = (num_open - num_rows + 1) / num_rows
    if num_kv_tokens and context + load.num_to_compute > num_kv_tokens:
        over = max(over, (context + load.num_to_compute) / num_kv_tokens - 1)
    if over:
        base_s += over * load.num_output * each_s
    return base_s, token_s, costs.position_s, each_s


def positions(num_new: int, num_before: int) -> float:
    """What so many tokens attend to, summed, after so many others."""
    return num_new * (num_before + (num_new - 1) / 2)
