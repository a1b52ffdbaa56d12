"""The house rules, checked from the source with `ast`: who may import whom, and what pure rooms must not touch.

Lazy imports inside functions count. The table here is the one in docs/architecture.md.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src" / "tokenmill"

ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "kv/blocks": {"core"},
    "kv/tiers": {"core"},
    "sched": {"core", "kv/blocks"},
    "cluster": {"core", "kv/blocks"},
    "engine": {"core", "kv/blocks", "sched"},
    "sim": {"core", "kv/blocks", "kv/tiers", "sched", "engine", "cluster"},
    "formats": {"core"},
    "text": {"core", "formats"},
    "ops": {"core"},
    "kv/transfer": {"core"},
    "kv/connector/worker": {"core", "ops", "kv/transfer"},
    "state": {"core"},
    "models": {"core", "formats", "ops"},
    "worker": {"core", "formats", "text", "ops", "models", "kv/transfer", "kv/connector/worker"},
    "server": {"core", "text", "cluster", "state"},
    "net": {"core"},
    "bench": {"core", "text"},
    "node": {
        "core",
        "kv/blocks",
        "sched",
        "engine",
        "formats",
        "text",
        "ops",
        "kv/transfer",
        "kv/connector/worker",
        "models",
        "worker",
        "net",
    },
    "plan": {"core", "kv/tiers", "cluster", "sim", "bench", "formats", "text", "models", "node"},
    "kv/store": {"core", "kv/tiers", "kv/transfer", "net", "node"},
    "helper": {"core", "formats", "text", "net", "node", "server"},
}
ALLOWED["llm"] = set(ALLOWED) - {"bench", "sim", "plan"}
WIRING = {"cli"}
PURE = {"core", "kv/blocks", "kv/tiers", "cluster", "sched", "engine", "sim"}

# Whatever reads a clock, draws unseeded randomness or starts a thread; `asyncio.wait` because it iterates a set.
BANNED_MODULES = {"time", "datetime", "threading", "secrets", "socket", "multiprocessing", "subprocess", "os"}
BANNED_CALLS = {"asyncio.wait", "uuid.uuid4", "uuid.uuid1", "asyncio.to_thread"}
RANDOM_FUNCTIONS = {
    "random",
    "randint",
    "randrange",
    "choice",
    "choices",
    "shuffle",
    "sample",
    "uniform",
    "getrandbits",
}


def room_of(parts: Sequence[str]) -> str | None:
    """The room that a file or module lies in: the longest name in the table that its path begins with."""
    names = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if name in ALLOWED or name in WIRING), None)


def files(room: str) -> list[Path]:
    paths = sorted((SRC / room).rglob("*.py"))
    return [path for path in paths if room_of(path.relative_to(SRC).parts) == room]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every imported module as an absolute dotted name, with its line."""
    package = path.relative_to(SRC.parent).with_suffix("").parts
    package = package if path.name == "__init__.py" else package[:-1]
    if path.name == "__init__.py":
        package = path.parent.relative_to(SRC.parent).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *(node.module.split(".") if node.module else ())))
            for alias in node.names:
                yield f"{stem}.{alias.name}", node.lineno


def test_every_file_is_in_a_room() -> None:
    """No file but charters of packages stands outside the house, and no room is empty."""
    outside = [path for path in SRC.rglob("*.py") if room_of(path.relative_to(SRC).parts) is None]
    assert all(path.name == "__init__.py" and not list(imports(path)) for path in outside if path.parent != SRC), (
        outside
    )
    for room in (*ALLOWED, *WIRING):
        assert len(files(room)) > 1, f"room {room} is empty"


def test_no_file_holds_more_than_a_reader_can() -> None:
    """400 lines, and 300 in the engine's core: what grows beyond that has a second idea in it."""
    sizes = {path.relative_to(SRC): len(path.read_text(encoding="utf8").splitlines()) for path in SRC.rglob("*.py")}
    most = {path: 300 if path.parts[0] == "engine" else 400 for path in sizes}
    assert not {str(path): size for path, size in sizes.items() if size > most[path]}


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_follow_the_table(room: str) -> None:
    """A room imports only the rooms below it."""
    wrong = []
    for path in files(room):
        for module, line in imports(path):
            package, *parts = module.split(".")
            if package != "tokenmill" or room_of(parts) in (room, None):
                continue
            if room_of(parts) not in ALLOWED[room]:
                wrong.append(f"{path.relative_to(SRC)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", sorted(PURE))
def test_pure_rooms_import_the_standard_library_only(room: str) -> None:
    """A pure room needs no installed package, clock, socket or thread."""
    wrong = []
    for path in files(room):
        for module, line in imports(path):
            top = module.split(".")[0]
            if top == "tokenmill":
                continue
            banned = top in BANNED_MODULES or top not in sys.stdlib_module_names
            if banned:
                wrong.append(f"{path.relative_to(SRC)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", sorted(PURE))
def test_pure_rooms_call_nothing_impure(room: str) -> None:
    """No module-level randomness, wall clock or set-ordered waiting in a pure room."""
    wrong = []
    for path in files(room):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            name = f"{node.value.id}.{node.attr}"
            if name in BANNED_CALLS or (node.value.id == "random" and node.attr in RANDOM_FUNCTIONS):
                wrong.append(f"{path.relative_to(SRC)}:{node.lineno} uses {name}")
    assert not wrong, "\n".join(wrong)


def test_importing_a_pure_room_loads_nothing_heavy() -> None:
    """`import tokenmill.engine` leaves numpy and friends unloaded: a simulation starts in a blink."""
    import subprocess

    code = (
        "import sys, tokenmill.engine.core, tokenmill.sim.loop\n"
        "bad = {'numpy', 'torch', 'msgspec', 'starlette', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {sorted(bad)}' if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SRC.parent)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
