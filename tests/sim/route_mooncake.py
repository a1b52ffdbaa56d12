"""Policies of routing on a trace of conversations, over simulated nodes.

    python tests/sim/route_mooncake.py TRACE.jsonl[.gz] [--nodes 16] [--policies least_load,cache_aware,kv_aware]

The policies are those of `cluster`, given the engines' books, costs and events as a gateway would give them; the nodes
are a linear step cost model with chunked prefill and a prefix cache that gives up what was used last (a tree: leaves
first). The rate at which least load saturates is measured first: that of requests served when all come much faster.
Then each policy runs at shares of it. `cache_aware` is the policy of the SGLang gateway: the tree that matches best
where it matches more than 0.3, else the smallest; the shortest queue where loads differ by more than 64 and 1.5 times.

A line of the trace: {"timestamp": ms, "input_length", "output_length", "hash_ids": [one for each 512 tokens]}.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import statistics
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenmill.cluster.entry import Entry
from tokenmill.cluster.index import STRIDE, PrefixIndex
from tokenmill.cluster.links import EngineLink
from tokenmill.cluster.router import make_routing
from tokenmill.cluster.routing import Route
from tokenmill.core.cost import Costs
from tokenmill.core.events import EngineStats, Ready, WorkerFacts
from tokenmill.core.kv_events import CLEARED, REMOVED, STORED, KVEvent, KVEvents
from tokenmill.core.request import Request, SamplingParams

COSTS = Costs(step_s=0.030, row_s=5e-5, token_s=1.1e-4, position_s=2.1e-9, context_s=3.3e-8)
"""A 70B model on eight GPUs of the A800 class: weights read once a step, 140 GFLOP a token, 320 KB of KV a token."""
STEP_TOKENS, ROWS, CACHE_TOKENS = 2048, 256, 3_000_000
HASH_TOKENS = 512
FLOOD = 8.0
BLOCK = HASH_TOKENS // STRIDE


class Line(NamedTuple):
    at_s: float
    num_input: int
    num_output: int
    hashes: tuple[int, ...]


def read(path: str, most: int) -> list[Line]:
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        rows = [json.loads(line) for line in file]
    rows = rows[:most] if most else rows
    lines = []
    for row in rows:
        hashes = tuple(row["hash_ids"])[: row["input_length"] // HASH_TOKENS]
        lines.append(Line(row["timestamp"] / 1e3, row["input_length"], max(1, row["output_length"]), hashes))
    return lines


def keys_of(hashes: Sequence[int]) -> bytes:
    """Four keys for each hash of the trace, of which the index keeps the last."""
    return b"".join(
        each.to_bytes(8, "little") + part.to_bytes(8, "little") for each in hashes for part in range(STRIDE)
    )


@dataclass(slots=True, eq=False)
class Call:
    line: Line
    entry: Entry
    at_s: float
    num_left: int = 0
    ttft_s: float = 0.0


@dataclass(slots=True, eq=False)
class Node:
    """One engine. Prompts are computed in order, `STEP_TOKENS` a step less one for each that draws."""

    link: EngineLink
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    waiting: deque[Call] = field(default_factory=deque)
    ends: list[tuple[int, int, Call]] = field(default_factory=list)
    step: int = 0
    num_drawing: int = 0
    num_context: int = 0
    computed: int = 0
    busy_s: float = 0.0
    seq: int = 1
    is_busy: bool = False
    done: list[Call] = field(default_factory=list)
    firsts: list[Call] = field(default_factory=list)
    events: list[KVEvent] = field(default_factory=list)

    def begin(self, now: float) -> float:
        """Compose a step; returns when it ends, or 0 with nothing to do."""
        self.done, self.firsts = [], []
        left = STEP_TOKENS - self.num_drawing
        num_tokens = num_rows = self.num_drawing
        num_positions, context = float(self.num_context), self.num_context
        while self.waiting and left > 0 and num_rows < ROWS:
            call = self.waiting[0]
            num_input = call.line.num_input
            if call.num_left < 0:
                call.num_left = num_input - self._hit(call.line)
            take = min(left, call.num_left)
            start = num_input - call.num_left
            num_rows += 1
            num_tokens += take
            context += start
            num_positions += take * (start + (take - 1) / 2)
            left -= take
            self.computed += take
            call.num_left -= take
            if call.num_left:
                break
            self.firsts.append(self.waiting.popleft())
        if not num_rows:
            return 0.0
        duration_s = (
            COSTS.step_s + COSTS.row_s * num_rows + COSTS.token_s * num_tokens
            + COSTS.position_s * num_positions + COSTS.context_s * context
        )  # fmt: skip
        self.busy_s += duration_s
        return now + duration_s

    def end(self, now: float) -> None:
        self.step += 1
        self.num_context += self.num_drawing
        while self.ends and self.ends[0][0] <= self.step:
            _, _, call = heapq.heappop(self.ends)
            self.num_drawing -= 1
            self.num_context -= call.line.num_input + call.line.num_output
            self.done.append(call)
        for call in self.firsts:
            call.ttft_s = now - call.at_s
            self._keep(call.line)
            if call.line.num_output > 1:
                self.num_drawing += 1
                self.num_context += call.line.num_input + 1
                heapq.heappush(self.ends, (self.step + call.line.num_output - 1, id(call), call))
            else:
                self.done.append(call)

    def _hit(self, line: Line) -> int:
        num_hit = 0
        for each in line.hashes:
            if each not in self.cache:
                break
            num_hit += HASH_TOKENS
        for each in reversed(line.hashes[: num_hit // HASH_TOKENS]):
            self.cache.move_to_end(each)
        hit = min(num_hit, (line.num_input - 1) // BLOCK * BLOCK)
        self.link.entries[line_id(line)].num_cached = hit
        return hit

    def _keep(self, line: Line) -> None:
        new = [each for each in line.hashes if each not in self.cache]
        for each in reversed(line.hashes):
            self.cache[each] = None
            self.cache.move_to_end(each)
        if new:
            depth = STRIDE * (len(line.hashes) - len(new))
            self.events.append(KVEvent(STORED, keys_of(new), b"", depth))
        gone = []
        while len(self.cache) * HASH_TOKENS > CACHE_TOKENS:
            gone.append(self.cache.popitem(last=False)[0])
        if gone:
            self.events.append(KVEvent(REMOVED, keys_of(gone)))


def line_id(line: Line) -> str:
    return f"{line.at_s}-{id(line)}"


class CacheAware:
    """The rival; its trees are as large as the nodes' caches."""

    uses_keys = False

    def __init__(self, lines: Mapping[str, Line]) -> None:
        self._lines = lines
        self._trees: dict[int, OrderedDict[int, None]] = {}

    def choose(self, request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
        hashes = self._lines[request.id].hashes
        counts = {number: len(link.entries) for number, link in links.items()}
        trees = {number: self._trees.setdefault(number, OrderedDict()) for number in links}
        if max(counts.values()) - min(counts.values()) > 64 and max(counts.values()) > 1.5 * min(counts.values()):
            number = min(counts, key=lambda each: counts[each])
        else:
            matched = {number: _prefix(hashes, tree) for number, tree in trees.items()}
            number = max(matched, key=lambda each: matched[each])
            if matched[number] <= 0.3 * max(1, len(hashes)):
                number = min(trees, key=lambda each: len(trees[each]))
        for each in reversed(hashes):
            trees[number][each] = None
            trees[number].move_to_end(each)
        while len(trees[number]) * HASH_TOKENS > CACHE_TOKENS:
            trees[number].popitem(last=False)
        return Route(links[number], "")

    def leave(self, link: int) -> None:
        pass


def _prefix(hashes: Sequence[int], tree: Mapping[int, None]) -> int:
    for index, each in enumerate(hashes):
        if each not in tree:
            return index
    return len(hashes)


class Result(NamedTuple):
    ttft_s: float
    p99_s: float
    hit: float
    busy: float
    balance: float
    end_s: float


def run(lines: Sequence[Line], policy: str, num_nodes: int, speed: float) -> Result:
    index = PrefixIndex()
    requests = {}
    nodes: dict[int, Node] = {}
    for number in range(num_nodes):
        ready = Ready(
            "sim", 2**20, 1, (), "", BLOCK, 0, max_num_seqs=ROWS, max_num_batched_tokens=STEP_TOKENS,
            worker=WorkerFacts(id=f"w{number}"),
        )  # fmt: skip
        nodes[number] = Node(EngineLink(number, ready, "mixed", EngineStats(costs=COSTS)))
        index.join(number)
        index.apply(number, KVEvents(0, (KVEvent(CLEARED),)))
    links = {number: node.link for number, node in nodes.items()}
    by_id = {line_id(line): line for line in lines}
    routing = CacheAware(by_id) if policy == "cache_aware" else make_routing(policy, index)
    sampling = SamplingParams()
    prompt = tuple(range(max(line.num_input for line in lines)))
    calls = []
    num_hit = num_input = 0
    heap: list[tuple[float, int]] = []
    at = 0
    while at < len(lines) or heap:
        if at < len(lines) and (not heap or lines[at].at_s / speed <= heap[0][0]):
            line, now = lines[at], lines[at].at_s / speed
            at += 1
            keys = keys_of(line.hashes) if routing.uses_keys else b""
            request = Request(
                line_id(line), prompt[: line.num_input], sampling, line.num_output, 0, keys=keys, arrival_s=now
            )
            entry = Entry(request)
            call = Call(line, entry, now, -1)
            requests[request.id] = call
            calls.append(call)
            route = routing.choose(request, links, now)
            route.link.give(entry, route.num_hit)
            index.expect(route.link.number, request.id, keys)
            node = nodes[route.link.number]
            node.waiting.append(call)
            if not node.is_busy:
                node.is_busy = True
                heapq.heappush(heap, (node.begin(now), route.link.number))
            continue
        now, number = heapq.heappop(heap)
        node = nodes[number]
        node.end(now)
        for call in node.firsts:
            entry = call.entry
            node.link.start(entry, entry.num_cached)
            entry.tokens.append(0)
            num_hit += entry.num_cached
            num_input += call.line.num_input
        node.link.step(EngineStats(costs=COSTS, prompt_tokens_computed=node.computed))
        if node.events:
            index.apply(number, KVEvents(node.seq, tuple(node.events)))
            node.seq += 1
            node.events.clear()
        for call in node.done:
            call.entry.tokens.extend([0] * (call.line.num_output - 1))
            index.settle(call.entry.request.id)
            node.link.take_back(call.entry)
        ends = node.begin(now)
        node.is_busy = ends > 0
        if node.is_busy:
            heapq.heappush(heap, (ends, number))
    last_s = lines[-1].at_s / speed
    ttfts = sorted(call.ttft_s for call in calls)
    busy = [node.busy_s for node in nodes.values()]
    return Result(
        statistics.fmean(ttfts), ttfts[int(0.99 * len(ttfts))], num_hit / num_input,
        statistics.fmean(busy) / last_s, max(busy) / statistics.fmean(busy),
        now,
    )  # fmt: skip


def saturation(lines: Sequence[Line], num_nodes: int) -> float:
    """How many times as fast as in the trace least load serves requests when there are always some that wait."""
    return lines[-1].at_s / run(lines, "least_load", num_nodes, FLOOD).end_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--most", type=int, default=0, help="lines of the trace; 0: all")
    parser.add_argument("--shares", default="0.8,0.95")
    parser.add_argument("--policies", default="least_load,cache_aware,kv_aware")
    parser.add_argument("--speed", type=float, default=0.0, help="at saturation; 0: measure it")
    args = parser.parse_args()
    lines = read(args.trace, args.most)
    speed = args.speed or saturation(lines, args.nodes)
    print(f"{len(lines)} requests, {args.nodes} nodes; least load saturates at {speed:.2f} times the trace's rate")
    for share in [float(each) for each in args.shares.split(",")]:
        for policy in args.policies.split(","):
            began_s = time.perf_counter()
            made = run(lines, policy, args.nodes, share * speed)
            print(
                f"{share:.0%} {policy:16} TTFT mean {made.ttft_s:7.3f} s p99 {made.p99_s:7.2f} s, hits {made.hit:.1%}, "
                f"busy {made.busy:.1%}, busiest/mean {made.balance:.3f}   ({time.perf_counter() - began_s:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
