"""What prompts share, from public traces: each request as a path of full blocks, in order of time.

A name stands for a block and all before it: equal names are an equal prefix. Names count from 0. Partly filled blocks
are left out, as no cache keeps them, and so are answers, which come back in the next turn's prompt.

    Mooncake          blocks of 512 tokens, as its ids say (Qin et al., FAST 2025)
    agentic coding    64 tokens, joined to longer blocks; conversations begin as a Poisson process, since the trace has
                      no times for it; tools and system prompt are shared by those of equal counts; a sub-agent's run is
                      a conversation of its own (callanjfox/kv-cache-tester)
    ServeGen          turns made of its clients' arrivals and lengths (Xiang et al., 2025), which name no blocks: a
                      client's requests share its system prompt (log-normal, median 500 tokens); a conversation begins
                      at an arrival and goes on with probability 2/3 after each turn, a think time (log-normal, median
                      55 s) and the answer's time later; each turn has all before it as its prefix
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

MOONCAKE_TOKENS = 512
AGENTIC_TOKENS = 64


class Asked(NamedTuple):
    at_s: float
    blocks: Sequence[int]


class Load(NamedTuple):
    """num_blocks: distinct ones."""

    name: str
    block_size: int
    requests: Sequence[Asked]
    num_blocks: int


class _Names:
    """Numbers for paths: of a block by its number's parent and what it is called there."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Any], int] = {}

    def path(self, parts: Iterable[Any]) -> list[int]:
        number, found = -1, []
        for part in parts:
            number = self._numbers.setdefault((number, part), len(self._numbers))
            found.append(number)
        return found

    def __len__(self) -> int:
        return len(self._numbers)


def load_of(name: str, block_size: int, requests: Iterable[tuple[float, Iterable[Any]]]) -> Load:
    """From what blocks are called after what comes before them."""
    names = _Names()
    asked = [Asked(at_s, names.path(parts)) for at_s, parts in requests]
    asked.sort(key=lambda one: one.at_s)
    return Load(name, block_size, asked, len(names))


def mooncake(name: str, rows: Iterable[dict[str, Any]]) -> Load:
    def requests() -> Iterator[tuple[float, list[Any]]]:
        for row in rows:
            yield row["timestamp"] / 1e3, row["hash_ids"][: row["input_length"] // MOONCAKE_TOKENS]

    return load_of(name, MOONCAKE_TOKENS, requests())


def agentic(name: str, rows: Iterable[dict[str, Any]], block_size: int = 512, starts_per_hour: float = 12.0) -> Load:
    """block_size: a multiple of 64."""
    rng = random.Random("agentic starts")
    names = block_size // AGENTIC_TOKENS

    def requests() -> Iterator[tuple[float, list[Any]]]:
        start_s = 0.0
        for row in rows:
            head = row["tool_tokens"], row["system_tokens"]
            yield from _agentic_run(row["requests"], start_s, row["id"], head, names)
            start_s += rng.expovariate(starts_per_hour / 3600.0)

    return load_of(name, block_size, requests())


def _agentic_run(
    turns: Sequence[dict[str, Any]], start_s: float, scope: str, head: tuple[int, int], num_joined: int
) -> Iterator[tuple[float, list[Any]]]:
    num_common = sum(head) // AGENTIC_TOKENS
    for nth, turn in enumerate(turns):
        at_s = start_s + float(turn["t"])
        if turn["type"] == "subagent":
            yield from _agentic_run(turn["requests"], at_s, f"{scope}/{nth}", head, num_joined)
            continue
        ids = [one for first, count in turn["hash_runs"] for one in range(first, first + count)]
        parts: list[Any] = []
        for place in range(0, len(ids) - num_joined + 1, num_joined):
            joined = tuple(ids[place : place + num_joined])
            is_common = place + num_joined <= num_common and joined == tuple(range(place + 1, place + num_joined + 1))
            parts.append((head if is_common else scope, joined))
        yield at_s, parts


def servegen(name: str, clients: Iterable[dict[str, Any]], num: int = 20_000, block_size: int = 128) -> Load:
    """About so many requests, of one day."""
    rng = random.Random("servegen turns")
    known = [client for client in clients if client.get("lengths")]
    windows = [(client, window) for client in known for window in client["trace"] if window[0] < 86400.0]
    kept = num / sum(window[1] * 600.0 for _, window in windows)

    def requests() -> Iterator[tuple[float, list[Any]]]:
        heads = {client["client"]: int(rng.lognormvariate(6.2, 1.0)) for client in known}
        for client, (start_s, rate, *_) in windows:
            by_start = client["lengths"]
            lengths = by_start[min(by_start, key=lambda one: abs(float(one) - start_s))]
            due = rate * 600.0 * kept / 3.0
            for _ in range(int(due) + (rng.random() < due % 1.0)):
                head = heads[client["client"]]
                talk = (client["client"], rng.random())
                yield from _turns(rng, start_s + 600.0 * rng.random(), talk, head, lengths, block_size)

    return load_of(name, block_size, requests())


def _turns(
    rng: random.Random, at_s: float, talk: tuple[int, float], head: int, lengths: dict[str, Any], block_size: int
) -> Iterator[tuple[float, list[Any]]]:
    num_tokens = head
    for _ in range(40):
        num_tokens += _draw(rng, lengths["input_tokens"])
        own = range(head // block_size, num_tokens // block_size)
        yield at_s, [*((talk[0], place) for place in range(head // block_size)), *((talk, place) for place in own)]
        num_answered = _draw(rng, lengths["output_tokens"])
        num_tokens += num_answered
        at_s += rng.lognormvariate(4.0, 1.2) + 0.03 * num_answered
        if rng.random() >= 2 / 3:
            break


def _draw(rng: random.Random, spread: dict[str, Any]) -> int:
    return max(1, int(rng.choices(spread["bin"], weights=spread["p"])[0]))


def bodies(name: str, rows: Iterable[dict[str, Any]], block_size: int = 16) -> Load:
    """From requests as they are sent, with `prompt` or `messages`, and `timestamp`, `time` or `created` in seconds;
    without, one comes each second. A token is taken to be four characters: equal beginnings are what counts."""
    width = 4 * block_size

    def requests() -> Iterator[tuple[float, list[Any]]]:
        for nth, row in enumerate(rows):
            row = row.get("body", row)
            text = row.get("prompt")
            if text is None:
                turns = row.get("messages") or ()
                text = "".join(f"\n{turn.get('role')}\n{turn.get('content')}" for turn in turns)
            at_s = next((float(row[key]) for key in ("timestamp", "time", "created") if key in row), float(nth))
            salt = row.get("cache_salt", "")
            whole = str(text)
            places = range(0, len(whole) - width + 1, width)
            yield at_s, [(salt, whole[place : place + width]) for place in places]

    return load_of(name, block_size, requests())


def trace_of(name: str, rows: Iterator[dict[str, Any]]) -> Load | None:
    """Whichever of these its first row shows it to be; None: none. Raises KeyError, TypeError, ValueError or
    AttributeError where a row is not like the first."""
    first = next(rows, None)
    if first is None:
        return None
    every = chain((first,), rows)
    if {"hash_ids", "input_length", "timestamp"} <= first.keys():
        return mooncake(name, every)
    if {"requests", "block_size", "tool_tokens"} <= first.keys():
        return agentic(name, every)
    if {"client", "trace", "lengths"} <= first.keys():
        return servegen(name, every)
    if {"prompt", "messages"} & first.get("body", first).keys():
        return bodies(name, every)
    return None
