"""Draws the two pictures of docs/architecture.md: `python scripts/make_diagrams.py` writes docs/rooms.svg, which room
may import which, from the table of tests/test_house.py, and docs/request.svg, the way of a request through the files.

tests/unit/test_docs.py holds what is committed against what this draws, and every file that it names must be there.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from test_house import ALLOWED, PURE, WIRING  # noqa: E402

SRC = ROOT / "src" / "tokenmill"

ABOUT = {
    "api": "bodies in, answers out, API by API",
    "bench": "load, peers, reports",
    "cli": "commands; wires all rooms together",
    "cluster": "gateway: admission, routing, moves",
    "control": "tenants, usage, audit, SLO",
    "core": "the nouns and ports that all share",
    "draft": "makes drafters off line",
    "engine": "handle, plan, commit; the shell",
    "formats": "GGUF, safetensors, hub",
    "sandbox": "a process for heavy and hostile jobs",
    "kv/blocks": "prefix tree, allocator, eviction",
    "kv/connector/scheduler": "which KV is loaded and saved",
    "kv/connector/worker": "bytes between pools and elsewhere",
    "kv/events": "what an engine tells of its cache",
    "kv/store": "the process that keeps KV tiers",
    "kv/tiers": "what is in which tier",
    "kv/transfer": "disk, peers, Redis, S3",
    "llm": "LLM, AsyncLLM in a program",
    "models": "decoders, encoders, weights",
    "net": "sockets, codecs, clock",
    "node": "this machine; options resolved",
    "ops": "kernels: reference and native",
    "plan": "cost models, loads on virtual time",
    "plugins": "names that packages add",
    "sched": "the rows of a step",
    "server": "HTTP, streams, limits",
    "sim": "virtual loop, toy executor, faults",
    "state": "SQLite files",
    "text": "tokenizer, templates, tools, grammars",
    "worker": "plans to arrays to tokens",
}

Stop = tuple[str, str]
"""A file, below src/tokenmill or native/src, and what happens there."""

FRONT_END: Sequence[Stop] = (
    ("server/layers.py", "traces, audit, keys, limits of HTTP"),
    ("api/openai/parse.py", "the body becomes a Call, or a 400"),
    ("server/generation.py", "the order of steps of every call"),
    ("text/calls.py", "template, token ids; n choices: n requests"),
    ("server/qos.py", "tenant, class, deadline, objectives"),
    ("cluster/request_queue.py", "is it let in, and when is its turn"),
    ("cluster/router.py", "which engine"),
    ("server/client.py", "submits it, hears its outputs"),
)
ENGINE: Sequence[Stop] = (
    ("engine/shell.py", "reads the inbox, plans, executes, commits"),
    ("engine/core.py", "handle: the request becomes a sequence"),
    ("sched/scheduler.py", "which sequences get rows in this step"),
    ("kv/blocks/manager.py", "cached prefix matched, blocks reserved"),
    ("worker/executor.py", "the plan becomes arrays"),
    ("ops/native/program.py", "one native call runs the forward pass"),
    ("worker/sampler.py", "the tokens, drawn by seed and position"),
    ("engine/commit.py", "appends them, publishes full blocks"),
)
ANSWER: Sequence[Stop] = (
    ("server/deltas.py", "each stream gets its outputs"),
    ("text/choice.py", "tokens to text; stop strings, tool calls"),
    ("control/usage/meter.py", "counted before it leaves"),
    ("server/stream.py", "server-sent events, or one object"),
)

STYLE = """text{font-family:system-ui,sans-serif;fill:#1b1f24}.n{font-size:14px;font-weight:600}
.a{font-size:11px;fill:#57606a}.h{font-size:13px;fill:#57606a}
rect{fill:#fff;stroke:#8c959f;rx:6}.pure{fill:#ddf4ff;stroke:#54aeff}.lane{fill:#f6f8fa;stroke:#d0d7de}
path{fill:none;stroke:#8c959f;stroke-width:1.2}.way{stroke:#0969da;stroke-width:2}"""


def svg(width: int, height: int, title: str, parts: Iterator[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    marker = (
        '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" style="fill:#8c959f;stroke:none"/></marker></defs>'
    )
    back = f'<rect width="{width}" height="{height}" style="fill:#fff;stroke:none"/>'
    return "\n".join((head, f"<title>{title}</title><style>{STYLE}</style>", marker, back, *parts, "</svg>", ""))


def heading(x: float, y: float, text: str) -> str:
    return f'<text class="h" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def way(path: str, kind: str = "way") -> str:
    return f'<path class="{kind}" marker-end="url(#to)" d="{path}"/>'


def box(x: float, y: float, width: float, height: float, name: str, about: str, kind: str = "") -> str:
    centre = x + width / 2
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'
        f'<text class="n" x="{centre:g}" y="{y + 19:g}" text-anchor="middle">{escape(name)}</text>'
        f'<text class="a" x="{centre:g}" y="{y + 35:g}" text-anchor="middle">{escape(about)}</text>'
    )


def direct(allowed: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """The imports that do not follow from others: room -> those it may import and none of these may."""

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(allowed[room]).union(*(below(each) for each in allowed[room]))

    return {
        room: {each for each in names if not any(each in below(other) for other in names if other != each)}
        for room, names in allowed.items()
    }


def rows_of(allowed: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Rooms from top to bottom, each above all that it may import, as near to the middle of these as there is place."""

    @cache
    def level(room: str) -> int:
        return 1 + max(map(level, allowed[room]), default=-1)

    rows: list[list[str]] = [[] for _ in range(1 + max(map(level, allowed)))]
    for room in sorted(allowed):
        rows[level(room)].append(room)
    return rows


def draw_rooms() -> str:
    allowed = {**ALLOWED, **{room: set(ALLOWED) for room in WIRING}}
    edges, rows = direct(allowed), rows_of(allowed)
    width, height, gap, across = 208, 46, 16, 44
    total = max(len(row) for row in rows) * (width + gap) + gap
    at: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        y = (len(rows) - 1 - number) * (height + across) + 40
        middle = {room: sum(at[each][0] for each in edges[room]) / max(1, len(edges[room])) for room in row}
        indent = (total - len(row) * (width + gap) + gap) / 2
        for place, room in enumerate(sorted(row, key=lambda room: (middle[room], room))):
            at[room] = (indent + place * (width + gap), y)

    def parts() -> Iterator[str]:
        yield heading(gap, 22, "Arrows lead to the rooms that a room may import. Blue: pure, the standard library only")
        for room, targets in sorted(edges.items()):
            for target in sorted(targets):
                (x, y), (to_x, to_y) = at[room], at[target]
                x, to_x, y = x + width / 2, to_x + width / 2, y + height
                bend = (to_y - y) / 2
                yield way(f"M{x:g} {y:g}C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y - 1:g}", "")
        for room, (x, y) in sorted(at.items()):
            yield box(x, y, width, height, room, ABOUT[room], "pure" if room in PURE else "")

    return svg(total, len(rows) * (height + across) + 20, "The rooms of tokenmill and who may import whom", parts())


def room_class(file: str) -> str:
    return "pure" if any(file.startswith(f"{room}/") for room in PURE) else ""


def draw_request() -> str:
    width, height, gap, top, margin = 300, 46, 14, 84, 24
    lanes = (
        ("front end: on the way in", FRONT_END),
        ("engine: once a step", ENGINE),
        ("front end: on the way out", ANSWER),
    )
    total = len(lanes) * (width + 3 * margin) + margin
    tall = top + max(len(stops) for _, stops in lanes) * (height + gap) + margin

    def parts() -> Iterator[str]:
        yield heading(
            margin, 24, "Front end and engine are processes, and send one message a step each way. Blue: pure"
        )
        for lane, (name, stops) in enumerate(lanes):
            x = margin + lane * (width + 3 * margin)
            yield f'<rect class="lane" x="{x}" y="40" width="{width + 2 * margin}" height="{tall - 56}"/>'
            yield heading(x + margin, 64, name)
            for place, (file, about) in enumerate(stops):
                y = top + place * (height + gap)
                if place:
                    middle = x + margin + width / 2
                    yield way(f"M{middle:g} {y - gap}L{middle:g} {y - 2}")
                yield box(x + margin, y, width, height, file, about, room_class(file))
        for lane in range(len(lanes) - 1):
            x = margin + lane * (width + 3 * margin) + margin + width
            y, to_y = top + (len(lanes[lane][1]) - 1) * (height + gap) + height / 2, top + height / 2
            to_x = x + 3 * margin - 2
            yield way(f"M{x:g} {y:g}C{x + 60:g} {y:g} {x + 10:g} {to_y:g} {to_x:g} {to_y:g}")

    return svg(total, tall, "The way of a request through tokenmill", parts())


PICTURES = {ROOT / "docs" / "rooms.svg": draw_rooms, ROOT / "docs" / "request.svg": draw_request}


def main() -> None:
    for path, draw in PICTURES.items():
        path.write_text(draw(), encoding="utf8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
