"""The cost model: how long a step takes, fitted to the steps that were made. There is this one; the engine sizes its
steps by it, the front end predicts waits from it, and a simulation can charge by it.

    duration = step + row * rows + token * tokens + position * (positions that the tokens attend to)
             + context * (positions that the rows read) + experts * (share of the experts that are read)

in seconds: weights are read once a step, the KV before a row once for the row, and all else is computed. Of a mixture
of experts a step reads those that its tokens choose: if each token chooses a share c of them by itself, n tokens read
1 - (1 - c) ** n. No coefficient
is negative, so more work is never predicted to take less time.

Steps are kept by their kind, which is the sizes of what they have to do; of each kind the last dozen or so count, less
when others have come since, but never nothing. So a thousand steps of decodes do not make the model forget what a
prompt takes. Least squares of relative errors, of steps that took more than twice what was predicted only twice that: a
machine that stalls once changes little. While only small steps are known, or only large ones, the others are assumed to
lie on a power of their tokens.

Pure: a result contains its duration, so a replay measures the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from .step import PlanRow


def non_negative(products: Sequence[Sequence[float]], targets: Sequence[float], sure: Sequence[float]) -> list[float]:
    """Coefficients of least squared error. products, targets: sums over all observations of each two quantities'
    product, and of each quantity times what was observed. sure: what holds each coefficient at 0 until observations
    differ in its quantity, as a share of what they say of it.

    The one that is most below 0, by what it adds, is taken out until none is: nearly the best of those that are not
    negative, and always found in the same few steps."""
    num = len(targets)
    units = [products[i][i] ** 0.5 for i in range(num)]
    used = [i for i in range(num) if units[i] > 0]
    while used:
        rows = [
            [
                *(products[i][j] / (units[i] * units[j]) + (sure[i] if i == j else 0.0) for j in used),
                targets[i] / units[i],
            ]
            for i in used
        ]
        found = _eliminate(rows)
        worst = min(range(len(used)), key=found.__getitem__)
        if found[worst] >= 0:
            by_place = dict(zip(used, found, strict=True))
            return [by_place.get(i, 0.0) / units[i] if units[i] else 0.0 for i in range(num)]
        del used[worst]
    return [0.0] * num


def _eliminate(rows: list[list[float]]) -> list[float]:
    """Solve equations whose matrix, all but the last column, is positive definite with ones on the diagonal."""
    num = len(rows)
    for i, row in enumerate(rows):
        for below in rows[i + 1 :]:
            share = below[i] / row[i]
            for j in range(i, num + 1):
                below[j] -= share * row[j]
    found = [0.0] * num
    for i in range(num - 1, -1, -1):
        row = rows[i]
        found[i] = (row[num] - sum(row[j] * found[j] for j in range(i + 1, num))) / row[i]
    return found


_KEPT = 0.92
"""Of what a step says, after each later one of its kind."""
_KNOWN = 4.0
"""A kind is known that so many steps are kept of."""
_AGED, _LEAST = 0.998, 0.03
"""Of what a kind has said, after each step of another one, and what is left of it at least."""
_MOST, _LEAST_SEEN = 2.0, 0.5
"""A step of a known kind counts as at most so many times what was predicted, and at least as the inverse."""
_REFIT, _SELDOM = 16, 256
"""Steps between two fits, where steps are not as predicted or were few so far, and where they are; the first ones are
fitted at once. A fit costs as much as a hundred rows of a step."""
_OFF = 0.05
"""Predictions are off if their errors since the last fit are more on average."""
_SURE = (1e-5, 1e-5, 1e-5, 1e-3, 1e-3, 1e-5)
"""What holds each coefficient at 0 until steps differ in its quantity, as a share of what they say of it."""
_PRIOR = 0.02
"""What an assumed step counts, against a real one."""
_POWER = 0.7
"""Assumed: steps take this power of their tokens, between what memory bounds and what computing does."""
_ENDS = ((1, 0), (512, 0), (1, 2048))
"""Tokens of assumed steps, and the positions before them."""
_FAR = 8
_LATELY = 1 / 32


class Work(NamedTuple):
    """What a step has to do. num_positions: summed over its tokens, how many positions come before each; num_context:
    the same summed over its rows, for the first token of each. num_drawn: tokens whose logits are computed, of each row
    that draws its last one and its drafts; 0 where nobody counted them. num_shared: of num_context, positions that
    another row of the step reads as well, so that a kernel that knows may read them once. What is expected need not be
    whole numbers."""

    num_rows: float
    num_tokens: float
    num_positions: float
    num_context: float = 0
    num_drawn: float = 0
    num_shared: float = 0


class CostModel(Protocol):
    """What says how long a step takes: `Costs` fitted to live steps, or what is known of a machine that is not here."""

    def predict(self, work: Work) -> float:
        """Seconds of a step that does this; never negative, and no less for more work."""
        ...


def work_of(rows: Iterable[PlanRow]) -> Work:
    num_rows = num_tokens = num_positions = num_context = num_drawn = 0
    for _, start, tokens, from_step, _, _, is_drawing, _, drafts in rows:
        num_rows += 1
        num_context += start
        num_drawn += is_drawing + len(drafts)
        num_new = (1 if from_step >= 0 else len(tokens)) + len(drafts)
        num_tokens += num_new
        num_positions += start if num_new == 1 else num_new * start + num_new * (num_new - 1) // 2
    return Work(num_rows, num_tokens, num_positions, num_context, num_drawn)


def read_share(chosen: float, num_tokens: float) -> float:
    """Of the experts, what so many tokens read that each choose the share `chosen` of them, evenly and by itself."""
    left: float = (1 - chosen) ** num_tokens
    return 1 - left


class Costs(NamedTuple):
    """Seconds for a step, and for each row, token and position of it, and each that its rows read; and for reading all
    experts, of which a token chooses the share `chosen`, 0 of a model that has none. All 0: nothing is known yet."""

    step_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    position_s: float = 0.0
    context_s: float = 0.0
    experts_s: float = 0.0
    chosen: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.step_s > 0 or self.row_s > 0 or self.token_s > 0

    def weights_s(self, num_tokens: float) -> float:
        """Seconds of a step of so many tokens that its rows, tokens and positions do not explain."""
        return self.step_s + self.experts_s * read_share(self.chosen, num_tokens) if self.chosen else self.step_s

    def predict(self, work: Work) -> float:
        """Seconds that a step takes."""
        return (
            self.weights_s(work.num_tokens)
            + self.row_s * work.num_rows
            + self.token_s * work.num_tokens
            + self.position_s * work.num_positions
            + self.context_s * work.num_context
        )

    def predict_decodes(self, num_rows: int, num_context: int, num_steps: int) -> list[float]:
        """As `predict` of steps one after the other that draw a token for each of the same rows."""
        base_s = self.weights_s(num_rows) + self.row_s * num_rows + self.token_s * num_rows
        position_s, context_s = self.position_s, self.context_s
        contexts = range(num_context, num_context + num_steps * num_rows, num_rows)
        return [base_s + position_s * context + context_s * context for context in contexts]


UNKNOWN = Costs()


class CostFitter:
    """costs   as fitted to the steps so far
    error   share by which predictions were off lately, on average; 0 before the first

    chosen: the share of the experts that a token chooses; 0: there are none.
    """

    def __init__(self, block_size: int = 1, chosen: float = 0.0) -> None:
        self._block_size = block_size
        self._chosen = chosen
        self.costs = UNKNOWN
        self.error = 0.0
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._num_noted = 0
        self._num_fitted = 0  # of the steps noted, those there were at the last fit
        self._off = 0.0  # errors since, together

    def note(self, work: Work, duration_s: float) -> None:
        """A step has ended."""
        num_rows, num_tokens, num_positions, num_context = work[:4]
        if duration_s <= 0 or not num_tokens:
            return
        key = (_size(num_tokens), _size(num_rows))
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
        scale, seen = duration_s, 1.0
        if self.costs.is_known:
            predicted_s = self.costs.predict(work)
            off = abs(predicted_s - duration_s) / duration_s
            self.error += _LATELY * (off - self.error)
            self._off += off
            if kind.weight >= _KNOWN:
                scale, seen = predicted_s, min(_MOST, max(_LEAST_SEEN, duration_s / predicted_s))
        facts = (1 / scale, num_rows / scale, num_tokens / scale, num_positions / scale, num_context / scale)
        kind.note(facts, seen, read_share(self._chosen, num_tokens) / scale if self._chosen else 0.0)
        self._num_noted += 1
        kind.num_tokens, kind.duration_s, kind.noted = num_tokens, scale * seen, self._num_noted
        num_since = self._num_noted - self._num_fitted
        if self._num_noted < _REFIT or (num_since >= _REFIT and self._is_due(num_since, kind)):
            self._fit()

    def note_decodes(self, num_rows: int, num_context: int, durations: Sequence[float]) -> None:
        """As `note` of steps one after the other that draw a token for each of the same rows. `num_context`: positions
        that the rows of the first read; each further step reads one more of each row."""
        at, num = 0, len(durations)
        while at < num:
            context = num_context + at * num_rows
            kind = self._kinds.get((_size(num_rows), _size(num_rows)))
            if kind is not None and kind.is_plain and self.costs.is_known and not self._chosen and durations[at] > 0:
                at += self._note_decodes(kind, num_rows, context, durations, at)
            else:
                self.note(Work(num_rows, num_rows, context, context), durations[at])
                at += 1

    def _note_decodes(self, kind: _Kind, num_rows: int, context: int, durations: Sequence[float], first: int) -> int:
        """Those from `first` on, up to the next fit at most, of a kind of which as many rows as tokens are known alone;
        how many. Half of the products are the same as others; what is computed, and in which order, is as in `note`."""
        step_s, row_s, token_s, position_s, context_s, _, _ = self.costs
        base_s = step_s + row_s * num_rows + token_s * num_rows
        aa, ab, _, ad, _, bb, _, bd, _, _, _, _, dd, _, _, at, bt, _, dt, _ = kind.sums
        weight, error, total_off = kind.weight, self.error, self._off
        num_noted, num_fitted, seldom = self._num_noted, self._num_fitted, min(_SELDOM, self._num_fitted)
        num = 0
        kept, lately = _KEPT, _LATELY
        scale = seen = 1.0
        is_due = False
        for duration_s in durations[first:] if first else durations:
            if duration_s <= 0:
                break
            predicted_s = base_s + position_s * context + context_s * context
            off = abs(predicted_s - duration_s) / duration_s
            error += lately * (off - error)
            total_off += off
            if weight >= _KNOWN:
                scale, seen = predicted_s, duration_s / predicted_s
                if not _LEAST_SEEN < seen < _MOST:
                    seen = min(_MOST, max(_LEAST_SEEN, seen))
            else:
                scale, seen = duration_s, 1.0
            a, b, d = 1 / scale, num_rows / scale, context / scale
            aa, ab, ad = kept * aa + a * a, kept * ab + a * b, kept * ad + a * d
            bb, bd, dd = kept * bb + b * b, kept * bd + b * d, kept * dd + d * d
            at, bt, dt = kept * at + a * seen, kept * bt + b * seen, kept * dt + d * seen
            weight = kept * weight + 1
            num += 1
            context += num_rows
            num_noted += 1
            num_since = num_noted - num_fitted
            if num_noted < _REFIT or (
                num_since >= _REFIT and (num_since >= seldom or total_off > _OFF * num_since or weight < _KNOWN)
            ):
                is_due = True
                break
        kind.sums = aa, ab, ab, ad, ad, bb, bb, bd, bd, bb, bd, bd, dd, dd, dd, at, bt, bt, dt, dt
        kind.weight, self.error, self._off, self._num_noted = weight, error, total_off, num_noted
        kind.num_tokens, kind.duration_s, kind.noted = num_rows, scale * seen, self._num_noted
        if is_due:
            self._fit()
        return num

    @property
    def attention(self) -> float:
        """core.policy.Measured: of a block of positions."""
        costs = self.costs
        return self._block_size * costs.position_s / costs.token_s if costs.token_s else 0.0

    def _is_due(self, num_since: int, kind: _Kind) -> bool:
        """Whether to fit anew, so many steps after the last fit, the last of them of this kind."""
        return num_since >= min(_SELDOM, self._num_fitted) or self._off > _OFF * num_since or kind.weight < _KNOWN

    def _fit(self) -> None:
        self._num_fitted, self._off = self._num_noted, 0.0
        parts = [(1.0, kind) for kind in self._assumed()]
        parts += [(max(_LEAST, _AGED ** (self._num_noted - kind.noted)), kind) for kind in self._kinds.values()]
        sums = [0.0] * len(parts[-1][1].sums)
        for share, kind in parts:
            sums = [whole + share * each for whole, each in zip(sums, kind.sums, strict=True)]
        found = non_negative(*_equations(sums), _SURE)
        self.costs = Costs(*found)._replace(chosen=self._chosen)

    def _assumed(self) -> list[_Kind]:
        """Steps of one row that nobody has made: of sizes far from all that are known, and a decode of a long context,
        without which the noise of a few short ones would be taken for what positions cost."""
        assumed = []
        for num_tokens, start in _ENDS:
            size = _size(num_tokens)
            near = self._kinds[min(self._kinds, key=lambda key: abs(key[0] - size))]
            if start or not num_tokens / _FAR <= near.num_tokens <= num_tokens * _FAR:
                scale = near.duration_s * (num_tokens / near.num_tokens) ** _POWER * (2 if start else 1) / _PRIOR**0.5
                num_positions = num_tokens * start + num_tokens * (num_tokens - 1) // 2
                kind = _Kind()
                facts = (1 / scale, 1 / scale, num_tokens / scale, num_positions / scale, start / scale)
                kind.note(facts, _PRIOR**0.5, read_share(self._chosen, num_tokens) / scale if self._chosen else 0.0)
                assumed.append(kind)
        return assumed


def _size(number: float) -> int:
    return int(number).bit_length()


class _Kind:
    """What steps of one kind have said: sums of products of their quantities, in the order of the upper triangle,
    then of quantities and durations, all in units of the duration; where experts are read, that sixth quantity
    comes behind all others, with its products in the same order. `num_tokens`, `duration_s`: of the last, which was
    step number `noted` of all."""

    __slots__ = ("duration_s", "noted", "num_tokens", "sums", "weight")

    def __init__(self) -> None:
        self.sums: Sequence[float] = (0.0,) * 20
        self.weight = 0.0
        self.num_tokens = 1.0
        self.duration_s = 0.0
        self.noted = 0

    @property
    def is_plain(self) -> bool:
        """Whether all steps so far had as many tokens as rows, and read no experts: what is a product with tokens is
        the same as with rows, and with positions as with what rows read."""
        z = self.sums
        return (
            len(z) == 20
            and z[1] == z[2] and z[3] == z[4] and z[5] == z[6] == z[9] and z[7] == z[8] == z[10] == z[11]
            and z[12] == z[13] == z[14] and z[16] == z[17] and z[18] == z[19]
        )  # fmt: skip

    def note(self, facts: tuple[float, float, float, float, float], seen: float, experts: float = 0.0) -> None:
        a, b, c, d, e = facts
        if not experts and len(self.sums) == 20:  # as below, at half of the price
            z, kept = self.sums, _KEPT
            self.sums = (
                kept * z[0] + a * a, kept * z[1] + a * b, kept * z[2] + a * c, kept * z[3] + a * d,
                kept * z[4] + a * e, kept * z[5] + b * b, kept * z[6] + b * c, kept * z[7] + b * d,
                kept * z[8] + b * e, kept * z[9] + c * c, kept * z[10] + c * d, kept * z[11] + c * e,
                kept * z[12] + d * d, kept * z[13] + d * e, kept * z[14] + e * e, kept * z[15] + a * seen,
                kept * z[16] + b * seen, kept * z[17] + c * seen, kept * z[18] + d * seen, kept * z[19] + e * seen,
            )  # fmt: skip
            self.weight = kept * self.weight + 1
            return
        more: tuple[float, ...] = (
            a * a, a * b, a * c, a * d, a * e, b * b, b * c, b * d, b * e, c * c, c * d, c * e, d * d, d * e, e * e,
            a * seen, b * seen, c * seen, d * seen, e * seen,
        )  # fmt: skip
        if experts:
            f = experts
            more += (a * f, b * f, c * f, d * f, e * f, f * f, f * seen)
        if len(self.sums) < len(more):
            self.sums = (0.0,) * len(more)
        self.sums = [_KEPT * before + new for before, new in zip(self.sums, more, strict=True)]
        self.weight = _KEPT * self.weight + 1


def _equations(sums: Sequence[float]) -> tuple[list[list[float]], list[float]]:
    """The products of quantities as a matrix, and those with durations, of sums in the order of _Kind."""
    products = [[0.0] * 5 for _ in range(5)]
    place = 0
    for i in range(5):
        for j in range(i, 5):
            products[i][j] = products[j][i] = sums[place]
            place += 1
    targets = list(sums[place : place + 5])
    if len(sums) > place + 5:
        *column, square, target = sums[place + 5 :]
        for row, product in zip(products, column, strict=True):
            row.append(product)
        products.append([*column, square])
        targets.append(target)
    return products, targets
