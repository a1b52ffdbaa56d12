"""Least squares whose coefficients are not negative, for laws of what things cost."""

from __future__ import annotations

from collections.abc import Sequence


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
