"""Published traces as plans: Mooncake, Azure, agentic coding, ServeGen and plain length pairs.

Traces hold lengths and identities, not text; a block id becomes drawn text of that key, so what was shared is really
shared. `scale` multiplies every length, block sizes included, to fit a large trace on a small machine with its reuse
intact; `max_model_len` cuts what still does not fit (the beginning of a prompt is kept), and the result says how much.

Sources: Mooncake (Qin et al., FAST'25); Azure (Patel et al., Splitwise, ISCA 2024); agentic coding
(callanjfox/kv-cache-tester); ServeGen (Xiang et al., arXiv 2505.09999).
"""

from __future__ import annotations

import csv
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .datasets import open_text, read_jsonl
from .plan import Call, Drawn, Message, Plan, generator

MOONCAKE_BLOCK = 512
SERVEGEN_WINDOW_S = 600.0


@dataclass(slots=True)
class Fit:
    """How a trace's lengths are brought to the server's size; counts what it had to cut."""

    scale: float = 1.0
    max_model_len: int | None = None
    num_cut: int = 0

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
        return {"length_scale": self.scale, "max_model_len": self.max_model_len, "num_cut": self.num_cut}


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
    if {"hash_ids", "input_length", "output_length", "timestamp"} <= row.keys():
        return mooncake(path, num, seed, fit, spread_s, is_sampled)
    if is_sampled:
        raise ConfigError("--trace-sample is for traces that name shared blocks (Mooncake).", param="trace_sample")
    if "," in first and not first.startswith("{"):
        columns = [column.strip() for column in first.split(",")]
        if "TIMESTAMP" in columns:
            return azure(path, num, seed, fit)
        if columns[:2] == ["num_prefill_tokens", "num_decode_tokens"]:
            return length_pairs(path, num, seed, fit)
    if {"requests", "block_size"} <= row.keys():
        return agentic(path, num, seed, fit)
    if {"client", "trace", "lengths"} <= row.keys():
        raise ConfigError("This is a client mix, not a list of requests: use --dataset-name servegen.")
    raise ConfigError(f"{path} is no trace of a known form (docs/benchmarking.md lists them).", param="dataset_path")


def _first_line(path: Path) -> str:
    try:
        with open_text(path) as lines:
            return lines.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}.", param="dataset_path") from None


def mooncake(path: Path, num: int, seed: int, fit: Fit, spread_s: float = 0.0, is_sampled: bool = False) -> Plan:
    """`timestamp` in ms; each of hash_ids names a block of 512 tokens and stands for all before it too. Sampled: whole
    conversations from all over the trace, the same ones for every seed, their times squeezed to the trace's rate."""
    if is_sampled:
        rows, times_s = _sampled(list(read_jsonl(path)), num, spread_s)
    else:
        rows = list(islice(read_jsonl(path), num))
        times_s = _times_s(rows, spread_s)
    block = fit.length(MOONCAKE_BLOCK)
    calls = []
    for i, (row, time_s) in enumerate(zip(rows, times_s, strict=True)):
        whole = len(row["hash_ids"]) - 1
        # Scaled block by block, the partly filled last one included, so that reuse stays on block borders.
        input_len = whole * block + fit.length(row["input_length"] - whole * MOONCAKE_BLOCK)
        keys = [f"block/{block_id}" for block_id in row["hash_ids"]]
        parts, output_len = fit.cut(blocks(keys, block, input_len), fit.length(row["output_length"]))
        calls.append(Call(i, (Message("user", parts),), output_len, delay_s=time_s, session=f"request-{i}"))
    facts = {"name": "mooncake", "path": str(path), "block_size": block, "spread_s": spread_s, "sampled": is_sampled}
    return Plan(tuple(calls), seed, facts | fit.facts(), has_times=True)


def _times_s(rows: Sequence[dict[str, Any]], spread_s: float) -> list[float]:
    stamps_s = [float(row["timestamp"]) / 1000.0 for row in rows]
    return spread(stamps_s, spread_s) if spread_s else stamps_s


def _sampled(rows: list[dict[str, Any]], num: int, spread_s: float) -> tuple[list[dict[str, Any]], list[float]]:
    """num rows (all, if there are fewer), conversation by conversation in a drawn order and then by time; the last one
    drawn may lose its end. The first few requests of a trace share little: conversations last longer than they do."""
    times_s = _times_s(rows, spread_s)
    members: dict[int, list[int]] = {}
    for i, key in enumerate(_conversations(rows)):
        members.setdefault(key, []).append(i)
    order = list(members.values())
    generator(0, "trace sample").shuffle(order)
    picked = sorted(islice((i for conversation in order for i in conversation), num))
    start_s, squeeze = (times_s[picked[0]], len(picked) / len(rows)) if picked else (0.0, 1.0)
    return [rows[i] for i in picked], [(times_s[i] - start_s) * squeeze for i in picked]


def _conversations(rows: Sequence[dict[str, Any]]) -> list[int]:
    """For each row the block that names its conversation: the first that most other rows do not have."""
    users = Counter(block_id for row in rows for block_id in row["hash_ids"])
    common = {block_id for block_id, count in users.items() if count > len(rows) / 2}
    return [next((key for key in row["hash_ids"] if key not in common), -1 - i) for i, row in enumerate(rows)]


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
    calls: list[Call] = []
    start: datetime | None = None
    with open_text(path) as lines:
        for i, row in enumerate(islice(csv.DictReader(lines), num)):
            stamp = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
            start = start or stamp
            parts, output_len = fit.cut(
                [Drawn(f"request/{i}", fit.length(int(row["ContextTokens"])))], fit.length(int(row["GeneratedTokens"]))
            )
            delay_s = (stamp - start).total_seconds()
            calls.append(Call(i, (Message("user", parts),), output_len, delay_s=delay_s, session=f"request-{i}"))
    return Plan(tuple(calls), seed, {"name": "azure", "path": str(path)} | fit.facts(), has_times=True)


def length_pairs(path: Path, num: int, seed: int, fit: Fit) -> Plan:
    """num_prefill_tokens, num_decode_tokens; no times, nothing is shared."""
    calls = []
    with open_text(path) as lines:
        for i, row in enumerate(islice(csv.DictReader(lines), num)):
            parts, output_len = fit.cut(
                [Drawn(f"request/{i}", fit.length(int(row["num_prefill_tokens"])))],
                fit.length(int(row["num_decode_tokens"])),
            )
            calls.append(Call(i, (Message("user", parts),), output_len, session=f"request-{i}"))
    return Plan(tuple(calls), seed, {"name": "lengths", "path": str(path)} | fit.facts())


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
        block_size, name = int(row["block_size"]), str(row["id"])
        common_blocks = (int(row["tool_tokens"]) + int(row["system_tokens"])) // block_size
        head = f"head/{row['tool_tokens']}/{row['system_tokens']}"
        keyed = _AgenticKeys(name, head, common_blocks)
        _append_agentic(calls, row["requests"], (), start_s, name, keyed, block_size, fit)
        start_s += rng.expovariate(starts_per_hour / 3600.0)
        num_sessions += 1
    facts = {"name": "agentic", "path": str(path), "num_sessions": num_sessions, "starts_per_hour": starts_per_hour}
    return Plan(tuple(calls[:num]), seed, facts | fit.facts(), has_times=True)


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
        cut, output_len = fit.cut(parts, fit.length(int(request["out"]) or 1))
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
    clients = [row for row in read_jsonl(path) if row.get("lengths")]
    horizon_s = duration_s if duration_s is not None else num / rate
    num_windows = max(1, math.ceil(horizon_s / SERVEGEN_WINDOW_S))
    starts = [window_start_s + i * SERVEGEN_WINDOW_S for i in range(num_windows)]
    windows = [{float(window[0]): window for window in client["trace"]} for client in clients]
    total = sum(float(found[start][1]) for found in windows for start in starts if start in found)
    if not total:
        raise ConfigError(f"No client of {path} is active {window_start_s:g} s into the trace.", param="trace_start")
    share = rate * num_windows / total
    arrivals: list[tuple[float, int, int, int]] = []
    for client, found in zip(clients, windows, strict=True):
        rng = generator(seed, f"client/{client['client']}")
        for i, start in enumerate(starts):
            if start not in found:
                continue
            lengths = _nearest_lengths(client["lengths"], start)
            for offset_s in _client_times(rng, found[start], float(found[start][1]) * share):
                at_s = i * SERVEGEN_WINDOW_S + offset_s
                arrivals.append((at_s, int(client["client"]), *_draw_lengths(rng, lengths)))
    arrivals.sort()
    calls = []
    for i, (at_s, number, input_len, output_len) in enumerate(a for a in arrivals if a[0] < horizon_s):
        if i == num:
            break
        parts, kept = fit.cut([Drawn(f"request/{i}", fit.length(input_len))], fit.length(output_len))
        name = f"client-{number}"
        calls.append(Call(i, (Message("user", parts),), kept, (), at_s, f"request-{i}", tenant=name))
    facts = {"name": "servegen", "path": str(path), "rate": rate, "window_start_s": window_start_s} | fit.facts()
    return Plan(tuple(calls), seed, facts, has_times=True)


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
