"""The house rules, checked from the source with `ast`: who may import whom, and what pure rooms must not touch.

Lazy imports inside functions count. The table here is the one in docs/architecture.md.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src" / "tokenmill"

ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "cache": {"core"},
    "sched": {"core", "cache"},
    "cluster": {"core", "cache"},
    "engine": {"core", "cache", "sched"},
    "sim": {"core", "cache", "sched", "engine", "cluster"},
    "formats": {"core"},
    "text": {"core", "formats"},
    "ops": {"core"},
    "store": {"core"},
    "models": {"core", "formats", "ops"},
    "worker": {"core", "formats", "text", "ops", "models", "store"},
    "server": {"core", "text", "cluster"},
    "net": {"core"},
    "bench": {"core", "text"},
    "node": {"core", "cache", "sched", "engine", "formats", "text", "ops", "store", "models", "worker", "net"},
    "helper": {"core", "formats", "text", "net", "node", "server"},
}
ALLOWED["llm"] = set(ALLOWED) - {"bench", "sim"}
WIRING = {"cli"}
PURE = {"core", "cache", "cluster", "sched", "engine", "sim"}

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


def rooms() -> list[str]:
    return sorted(path.name for path in SRC.iterdir() if path.is_dir() and path.name != "__pycache__")


def files(room: str) -> list[Path]:
    return sorted((SRC / room).rglob("*.py"))


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


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "tokenmill" and len(parts) > 1 else None


def test_every_room_is_in_the_table() -> None:
    """No room stands outside the house, and none is empty."""
    for room in rooms():
        assert room in ALLOWED or room in WIRING, f"room {room} is not in the import table"
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
            target = room_of(module)
            if target is None or target == room or target.startswith("__version__"):
                continue
            if target not in ALLOWED[room]:
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
