"""The order of contexts, in which the end of a text is found among all places of a corpus by bisection.

The context of a place is its token, the one before it, and so on to the beginning of its text, DEPTH tokens at most.
Contexts are ordered as words are, the last token first; one that another begins with comes before it. Of equal ones,
the earlier place comes first. This is a suffix array (Manber and Myers, 1993) of the text read backwards, cut off at a
depth.
"""

from __future__ import annotations

import numpy as np

DEPTH = 256
"""Tokens of a context, at most: no match is longer (core/speculation.py)."""


def followed_places(tokens: np.ndarray) -> np.ndarray:
    """Of tokens [N], where a text begins and ends with a negative one: places of those that another follows."""
    return np.flatnonzero((tokens[:-1] >= 0) & (tokens[1:] >= 0)).astype(np.int32)


def sort_contexts(tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Places of tokens [N], int32, in the order of their contexts. By doubling: what is ordered by so many tokens is
    ordered by twice as many where pairs of ranks are. Takes about 50 bytes a token."""
    at = np.arange(len(tokens), dtype=np.int64)
    begins = np.maximum.accumulate(np.where(tokens < 0, at, 0))  # what is before the text
    rank = np.maximum(tokens.astype(np.int64) + 1, 0)
    step = 1
    while step < DEPTH:
        key = rank * (rank.max() + 1) + rank[np.maximum(at - step, begins)]
        order = np.argsort(key, kind="stable")
        ranked = np.cumsum(np.concatenate(([0], np.diff(key[order]) != 0)))
        rank[order] = ranked
        if ranked[-1] == len(tokens) - 1:
            break
        step *= 2
    return places[np.argsort(rank[places], kind="stable")]
