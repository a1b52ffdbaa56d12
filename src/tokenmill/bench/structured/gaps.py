"""What grammars that explode cost everybody else: gaps between the tokens of others' answers, without and with them.

The others stream answers as long as allowed, every second one held to a schema that a mask takes microseconds for.
Meanwhile so many grammars come at once, again and again until the others have ended: in turns such as explode after
some tokens, which an engine meets, and such as do at their beginning, which a server can refuse before. Each pattern is
new.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from ...core.errors import ConfigError, EngineFailed, InvalidRequest, Unavailable
from ..load.histogram import quantile
from ..quality.api import ApiSubject

NUM_OTHERS = 8
_NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 10_000}
_BOMB_TOKENS = 30


def measure_gaps(subject: ApiSubject, num_bombs: int, max_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Figures without grammars that explode, and with so many at once. max_tokens: of each of the others."""
    return [_measure(subject, number, max_tokens, seed + place) for place, number in enumerate((0, num_bombs))]


def _measure(subject: ApiSubject, num_bombs: int, max_tokens: int, seed: int) -> dict[str, Any]:
    ends: Counter[str] = Counter()
    began_s = time.monotonic()
    with ThreadPoolExecutor(NUM_OTHERS) as others, ThreadPoolExecutor(max(1, num_bombs)) as pool:
        streams = [others.submit(_stream, subject, place, max_tokens, seed) for place in range(NUM_OTHERS)]
        number = 0
        while num_bombs and not all(stream.done() for stream in streams):
            for end in pool.map(lambda place, number=number: _explode(subject, place, number, seed), range(num_bombs)):
                ends[end] += 1
            number += 1
        gaps_s = sorted(gap_s for stream in streams for gap_s in stream.result())
    if not gaps_s:
        raise ConfigError("The server streamed no tokens one by one.", param="url")
    return {
        "num_bombs": num_bombs,
        "bombs_ended_as": dict(ends.most_common()),
        "num_gaps": len(gaps_s),
        "seconds": time.monotonic() - began_s,
        "p50_s": quantile(gaps_s, 0.5),
        "p99_s": quantile(gaps_s, 0.99),
        "max_s": gaps_s[-1],
    }


def _stream(subject: ApiSubject, place: int, max_tokens: int, seed: int) -> list[float]:
    body: dict[str, Any] = {
        "model": subject.model,
        "prompt": f"Numbers of the list {seed}.{place}:",
        "max_tokens": max_tokens,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
    }
    if place % 2:
        body["guided_json"] = _NUMBERS
    return [after_s - before_s for before_s, after_s in pairwise(subject.stream("/v1/completions", body))]


def _explode(subject: ApiSubject, place: int, number: int, seed: int) -> str:
    """How the call ended."""
    repeated, letter = 1000 + number // 2 + seed, chr(ord("a") + place % 26)
    inner = f"({letter}{{1000}}){{{repeated}}}"
    pattern = inner if number % 2 else f"[{letter}x]{{{9 + place // 26}}}{inner}"
    body = {"model": subject.model, "prompt": "hi", "max_tokens": _BOMB_TOKENS, "guided_regex": pattern}
    try:
        subject.post("/v1/completions", body)
    except InvalidRequest:
        return "refused"
    except (EngineFailed, Unavailable):
        return "failed"
    return "answered"
