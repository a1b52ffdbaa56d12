"""Published traces as plans: Mooncake, Azure, agentic coding, ServeGen and plain length pairs.

Traces hold lengths and identities, not text; a block id becomes drawn text of that key, so what was shared is really
shared. `scale` multiplies every length, block sizes included, to fit a large trace on a small machine with its reuse
intact; `max_model_len` cuts what still does not fit (the beginning of a prompt is kept), and the result says how much.
What is wrong with a trace's rows is dealt with in `trace_rows`, and said.

Sources: Mooncake (Qin et al., FAST'25); Azure (Patel et al., Splitwise, ISCA 2024); agentic coding
(callanjfox/kv-cache-tester); ServeGen (Xiang et al., arXiv 2505.09999).
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...text.files import read_jsonl, read_lines
from .plan import Call, Drawn, Message, Plan, generator
from .trace_rows import (
    AZURE_COLUMNS,
    LENGTH_COLUMNS,
    Arrival,
    Notes,
    arrivals,
    azure_row,
    csv_rows,
    length_pair,
    mooncake_row,
)  # fmt: skip

MOONCAKE_BLOCK = 512
SERVEGEN_WINDOW_S = 600.0

MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError, OverflowError)
"""What reading a row of nested JSON raises where its shape is not the trace's."""


@dataclass(slots=True)
class Fit:
    """How a trace's lengths are brought to the server's size; counts what it had to cut."""

    scale: float = 1.0
    max_model_len: int | None = None
    num_cut: int = 0
    notes: Notes = field(default_factory=Notes)

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise ConfigError(f"--length-scale is above 0 and at most 1, got {self.scale}.", param="length_scale")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("--max-model-len must be at least 2.", param="max_model_len")

    def length(self, num_tokens: float) -> int:
        return max(1, round(num_tokens * self.scale))

    def cut(self, parts: Sequence[Drawn], output_len: int) -> tuple[tuple[Drawn, ...], int]:
        """parts and output length within max_model_len: the output is cut to half of it, then the prompt's end."""
        if self.max_model_len is None:
            return tuple(parts), output_len
        kept_output = min(output_len, self.max_model_len // 2)
        room = self.max_model_len - kept_output
        kept: list[Drawn] = []
        for part in parts:
            if room:
                kept.append(Drawn(part.key, min(part.num_tokens, room)))
                room -= kept[-1].num_tokens
        asked = sum(part.num_tokens for part in parts)
        self.num_cut += kept_output < output_len or asked > self.max_model_len - kept_output
        return tuple(kept), kept_output

    def facts(self) -> dict[str, Any]:
        facts = {"length_scale": self.scale, "max_model_len": self.max_model_len, "num_cut": self.num_cut}
        return facts | {"notes": self.notes.counts}


def blocks(keys: Sequence[str], block_size: int, num_tokens: int) -> list[Drawn]:
    """num_tokens tokens as blocks of the given keys; the last one is partly filled."""
    parts: list[Drawn] = []
    left = num_tokens
    for key in keys:
        if left <= 0:
            break
        parts.append(Drawn(key, min(block_size, left)))
        left -= block_size
    return parts


def read_trace(path: Path, num: int, seed: int, fit: Fit, spread_s: float = 0.0, is_sampled: bool = False) -> Plan:
    """The first `num` requests of a trace, or a sample of its conversations; its form is seen from its fields.
    `spread_s`: requests that share a time stamp of that resolution are spread evenly over it. Raises ConfigError."""
    first = _first_line(path)
    row = next(read_jsonl(path), {}) if first.startswith("{") else {}
    if {"input_length", "output_length", "timestamp"} <= row.keys():
        return mooncake(path, num, seed, fit, spread_s, is_sampled)
    if is_sampled:
        raise ConfigError("--trace-sample is for traces that name shared blocks (Mooncake).", param="trace_sample")
    if "," in first and not first.startswith("{"):
        columns = [column.strip() for column in first.split(",")]
        if "TIMESTAMP" in columns:
            return azure(path, num, seed, fit)
        if columns[:2] == list(LENGTH_COLUMNS):
            return length_pairs(path, num, seed, fit)
    if {"requests", "block_size"} <= row.keys():
        return agentic(path, num, seed, fit)
    if {"client", "trace", "lengths"} <= row.keys():
        raise ConfigError("This is a client mix, not a list of requests: use --dataset-name servegen.")
    raise ConfigError(
        f"{path} is no trace of a known form (docs/operate/benchmarking.md lists them).", param="dataset_path"
    )


def _first_line(path: Path) -> str:
    return next(read_lines(path), "").strip()


def mooncake(path: Path, num: int, seed: int, fit: Fit, spread_s: float = 0.0, is_sampled: bool = False) -> Plan:
    """`timestamp` in ms; each of hash_ids names a block of 512 tokens and stands for all before it too; a prompt
    without shares nothing. Sampled: whole conversations from all over the trace, the same ones for every seed, their
    times squeezed to the trace's rate."""
    most = sys.maxsize if is_sampled else num
    rows = arrivals(read_jsonl(path), mooncake_row, path, fit.notes, most)
    times_s = [row.time_s for row in rows]
    times_s = spread(times_s, spread_s) if spread_s else times_s
    if is_sampled:
        rows, times_s = _sampled(rows, times_s, num)
    calls = []
    for i, (row, time_s) in enumerate(zip(rows, times_s, strict=True)):
        parts, output_len = fit.cut(_mooncake_parts(row, i, fit), fit.length(row.output_len))
        calls.append(Call(i, (Message("user", parts),), output_len, delay_s=time_s, session=f"request-{i}"))
    facts = {"name": "mooncake", "path": str(path), "block_size": fit.length(MOONCAKE_BLOCK), "spread_s": spread_s}
    return Plan(tuple(calls), seed, facts | {"sampled": is_sampled} | fit.facts(), True, fit.notes.remarks)


def _mooncake_parts(row: Arrival, index: int, fit: Fit) -> list[Drawn]:
    """The prompt is as long as the trace says. Ids beyond its end are dropped; what the ids do not reach is its own."""
    block, own = fit.length(MOONCAKE_BLOCK), f"request/{index}"
    num_blocks = -(-row.input_len // MOONCAKE_BLOCK)
    keys = [f"block/{block_id}" for block_id in row.ids[:num_blocks]]
    if not row.ids:
        fit.notes.add("rows have no hash_ids: their prompts share nothing")
    elif len(row.ids) != num_blocks:
        fit.notes.add("prompts are not as long as their hash_ids: ids too many were dropped, tokens too many are drawn")
    if len(keys) < num_blocks:
        rest = row.input_len - len(keys) * MOONCAKE_BLOCK
        return [*blocks(keys, block, len(keys) * block), Drawn(own, fit.length(rest))]
    # Scaled block by block, the partly filled last one included, so that reuse stays on block borders.
    whole = num_blocks - 1
    return blocks(keys, block, whole * block + fit.length(row.input_len - whole * MOONCAKE_BLOCK))


def _sampled(rows: list[Arrival], times_s: list[float], num: int) -> tuple[list[Arrival], list[float]]:
    """num rows (all, if there are fewer), conversation by conversation in a drawn order and then by time; the last one
    drawn may lose its end. The first few requests of a trace share little: conversations last longer than they do."""
    members: dict[int | str, list[int]] = {}
    for i, key in enumerate(_conversations(rows)):
        members.setdefault(key, []).append(i)
    order = list(members.values())
    generator(0, "trace sample").shuffle(order)
    picked = sorted(islice((i for conversation in order for i in conversation), num))
    start_s, squeeze = (times_s[picked[0]], len(picked) / len(rows)) if picked else (0.0, 1.0)
    return [rows[i] for i in picked], [(times_s[i] - start_s) * squeeze for i in picked]


def _conversations(rows: Sequence[Arrival]) -> list[int | str]:
    """For each row the block that names its conversation: the first that most other rows do not have."""
    users = Counter(block_id for row in rows for block_id in row.ids)
    common = {block_id for block_id, count in users.items() if count > len(rows) / 2}
    return [next((key for key in row.ids if key not in common), -1 - i) for i, row in enumerate(rows)]


def spread(stamps_s: Sequence[float], step_s: float) -> list[float]:
    """Ascending stamps, those that are equal spread evenly over the step that follows."""
    times: list[float] = []
    i = 0
    while i < len(stamps_s):
        end = next((j for j in range(i, len(stamps_s)) if stamps_s[j] != stamps_s[i]), len(stamps_s))
        width = min(step_s, stamps_s[end] - stamps_s[i]) if end < len(stamps_s) else step_s
        times += [stamps_s[i] + width * k / (end - i) for k in range(end - i)]
        i = end
    return times


def azure(path: Path, num: int, seed: int, fit: Fit) -> Plan:
    """TIMESTAMP (wall clock, 100 ns digits), ContextTokens, GeneratedTokens; nothing is shared."""
    rows = arrivals(csv_rows(path, AZURE_COLUMNS), azure_row, path, fit.notes, num)
    return _unshared("azure", path, rows, seed, fit, has_times=True)


def length_pairs(path: Path, num: int, seed: int, fit: Fit) -> Plan:
    """num_prefill_tokens, num_decode_tokens; no times, nothing is shared."""
    rows = arrivals(csv_rows(path, LENGTH_COLUMNS), length_pair, path, fit.notes, num)
    return _unshared("lengths", path, rows, seed, fit)


def _unshared(name: str, path: Path, rows: Sequence[Arrival], seed: int, fit: Fit, has_times: bool = False) -> Plan:
    calls = []
    for i, row in enumerate(rows):
        parts, output_len = fit.cut([Drawn(f"request/{i}", fit.length(row.input_len))], fit.length(row.output_len))
        calls.append(Call(i, (Message("user", parts),), output_len, delay_s=row.time_s, session=f"request-{i}"))
    facts = {"name": name, "path": str(path)} | fit.facts()
    return Plan(tuple(calls), seed, facts, has_times, fit.notes.remarks)


def agentic(path: Path, num: int, seed: int, fit: Fit, starts_per_hour: float = 12.0) -> Plan:
    """Conversations with a coding agent. Each request waits its think time after the one before; a sub-agent's run
    forks off after the request before it, and the conversation goes on when the run has ended. Conversations start
    as a Poisson process, starts_per_hour of them, since the trace gives them no times. Ids are the conversation's own;
    the tool and system tokens at the head are common to all conversations of the same counts."""
    rng = generator(seed, "starts")
    calls: list[Call] = []
    start_s = 0.0
    num_sessions = 0
    for row in read_jsonl(path):
        if len(calls) >= num:
            break
        num_before = len(calls)
        try:
            block_size, name = int(row["block_size"]), str(row["id"])
            common_blocks = (int(row["tool_tokens"]) + int(row["system_tokens"])) // block_size
            head = f"head/{row['tool_tokens']}/{row['system_tokens']}"
            keyed = _AgenticKeys(name, head, common_blocks)
            _append_agentic(calls, row["requests"], (), start_s, name, keyed, block_size, fit)
        except MALFORMED as error:
            del calls[num_before:]
            fit.notes.add(f"conversations were left out: {_reason(error)}")
            continue
        start_s += rng.expovariate(starts_per_hour / 3600.0)
        num_sessions += 1
    if not calls:
        raise ConfigError(f"{path} has no conversation that can be used.", param="dataset_path")
    facts = {"name": "agentic", "path": str(path), "num_sessions": num_sessions, "starts_per_hour": starts_per_hour}
    return Plan(tuple(calls[:num]), seed, facts | fit.facts(), True, fit.notes.remarks)


@dataclass(frozen=True, slots=True)
class _AgenticKeys:
    """Names of a conversation's blocks: the first `num_common` positions are shared where the ids are the run that
    starts the conversation, 1, 2, 3...; all others are its own."""

    session: str
    head: str
    num_common: int

    def name(self, position: int, block_id: int) -> str:
        is_common = position < self.num_common and block_id == position + 1
        return f"{self.head}/{position}" if is_common else f"{self.session}/{block_id}"


def _append_agentic(
    calls: list[Call],
    requests: Sequence[dict[str, Any]],
    after: tuple[int, ...],
    start_s: float,
    session: str,
    keyed: _AgenticKeys,
    block_size: int,
    fit: Fit,
) -> tuple[int, ...]:
    """Append a run of requests that begins after `after`; returns what its successor waits for."""
    block = fit.length(block_size)
    for turn, request in enumerate(requests):
        if request["type"] == "subagent":
            fork = _AgenticKeys(f"{keyed.session}/fork-{len(calls)}", keyed.head, keyed.num_common)
            name = f"{session}/subagent-{turn}"
            after = _append_agentic(calls, request["requests"], after, start_s, name, fork, block_size, fit)
            continue
        ids = [i for first, count in request["hash_runs"] for i in range(first, first + count)]
        parts = blocks([keyed.name(i, block_id) for i, block_id in enumerate(ids)], block, len(ids) * block)
        tail = int(request["in"]) - len(ids) * block_size
        index = len(calls)
        if tail > 0 or not parts:
            parts.append(Drawn(f"{keyed.session}/tail-{index}", fit.length(max(1, tail))))
        if int(request["out"]) < 1:
            fit.notes.add("requests without an answer ask for one token")
        cut, output_len = fit.cut(parts, fit.length(max(1, int(request["out"]))))
        delay_s = float(request.get("think_time") or 0.0) if after else start_s
        calls.append(Call(index, (Message("user", cut),), output_len, after, delay_s, session, turn))
        after = (index,)
    return after


def servegen(
    path: Path, num: int, seed: int, fit: Fit, rate: float, window_start_s: float, duration_s: float | None = None
) -> Plan:
    """A mix of clients, each a tenant with its own arrivals and lengths, `rate` requests per second in all.

    A client's gaps are drawn from its window's Gamma or Weibull distribution and stretched so that it keeps its share
    of the rate; its lengths from the nearest window that has some. Clients without lengths or silent in the window are
    left out. Windows follow one another from window_start_s on.
    """
    clients = list(_clients(path, fit.notes))
    horizon_s = duration_s if duration_s is not None else num / rate
    num_windows = max(1, math.ceil(horizon_s / SERVEGEN_WINDOW_S))
    starts = [window_start_s + i * SERVEGEN_WINDOW_S for i in range(num_windows)]
    windows = [found for _, found in clients]
    total = sum(float(found[start][1]) for found in windows for start in starts if start in found)
    if not total:
        raise ConfigError(f"No client of {path} is active {window_start_s:g} s into the trace.", param="trace_start")
    share = rate * num_windows / total
    due: list[tuple[float, int, int, int]] = []
    for client, found in clients:
        drawn: list[tuple[float, int, int, int]] = []
        try:
            rng = generator(seed, f"client/{client['client']}")
            for i, start in enumerate(starts):
                if start not in found:
                    continue
                lengths = _nearest_lengths(client["lengths"], start)
                for offset_s in _client_times(rng, found[start], float(found[start][1]) * share):
                    at_s = i * SERVEGEN_WINDOW_S + offset_s
                    drawn.append((at_s, int(client["client"]), *_draw_lengths(rng, lengths)))
        except MALFORMED as error:
            fit.notes.add(f"clients were left out: {_reason(error)}")
            continue
        due += drawn
    due.sort()
    calls = []
    for i, (at_s, number, input_len, output_len) in enumerate(a for a in due if a[0] < horizon_s):
        if i == num:
            break
        parts, kept = fit.cut([Drawn(f"request/{i}", fit.length(input_len))], fit.length(output_len))
        name = f"client-{number}"
        calls.append(Call(i, (Message("user", parts),), kept, (), at_s, f"request-{i}", tenant=name))
    facts = {"name": "servegen", "path": str(path), "rate": rate, "window_start_s": window_start_s} | fit.facts()
    return Plan(tuple(calls), seed, facts, True, fit.notes.remarks)


def _clients(path: Path, notes: Notes) -> Iterator[tuple[dict[str, Any], dict[float, Any]]]:
    """Each with its windows by when they start."""
    for row in read_jsonl(path):
        if not row.get("lengths"):
            continue
        try:
            windows = {float(window[0]): (float(window[0]), float(window[1]), *window[2:]) for window in row["trace"]}
        except MALFORMED as error:
            notes.add(f"clients were left out: {_reason(error)}")
            continue
        yield row, windows


def _reason(error: Exception) -> str:
    return f"no {error.args[0]}" if isinstance(error, KeyError) else f"malformed ({error})"


def _client_times(rng: random.Random, window: Sequence[Any], rate: float) -> Iterator[float]:
    """Ascending times within one window at `rate` requests per second. The first gap is cut at a random place, so
    that clients do not begin together."""
    if len(window) >= 6:
        kind, shape = str(window[3]), float(window[4])
    else:
        kind, shape = "Gamma", 1.0
    mean = 1.0 if kind == "Gamma" else math.gamma(1.0 + 1.0 / shape)
    first = True
    time_s = 0.0
    while True:
        raw = rng.gammavariate(shape, 1.0 / shape) if kind == "Gamma" else rng.weibullvariate(1.0, shape) / mean
        gap_s = raw / rate
        time_s += gap_s * rng.random() if first else gap_s
        first = False
        if time_s >= SERVEGEN_WINDOW_S:
            return
        yield time_s


def _nearest_lengths(lengths: dict[str, Any], start_s: float) -> dict[str, Any]:
    key = min(lengths, key=lambda key: (abs(float(key) - start_s), float(key)))
    found: dict[str, Any] = lengths[key]
    return found


def _draw_lengths(rng: random.Random, lengths: dict[str, Any]) -> tuple[int, int]:
    drawn = [
        rng.choices(lengths[name]["bin"], weights=lengths[name]["p"], k=1)[0]
        for name in ("input_tokens", "output_tokens")
    ]
    return max(1, int(drawn[0])), max(1, int(drawn[1]))
