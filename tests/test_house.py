"""The house rules, checked from the source with `ast`: who may import whom, and what pure rooms must not touch.

Lazy imports inside functions count. The table here is the one in docs/architecture.md.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from house_figures import (
    SRC,
    circles,
    import_graph,
    imports,
    long_functions,
    module_name,
    room_of,
    upward_arrows,
    wide_functions,
)

ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "kv/blocks": {"core"},
    "kv/events": {"core", "kv/blocks"},
    "kv/tiers": {"core"},
    "kv/connector/scheduler": {"core", "kv/blocks", "kv/events", "sched"},
    "sched": {"core", "kv/blocks"},
    "cluster": {"core", "kv/blocks"},
    "engine": {"core", "kv/blocks", "kv/events", "kv/connector/scheduler", "sched"},
    "sim": {"core", "kv/blocks", "kv/events", "kv/tiers", "kv/connector/scheduler", "sched", "engine", "cluster"},
    "plugins": {"core"},
    "formats": {"core", "plugins"},
    "text": {"core", "plugins", "formats"},
    "ops": {"core"},
    "kv/transfer": {"core", "plugins"},
    "kv/connector/worker": {"core", "ops", "kv/transfer"},
    "state": {"core"},
    "models": {"core", "plugins", "formats", "ops"},
    "worker": {"core", "formats", "text", "ops", "models", "state", "kv/transfer", "kv/connector/worker"},
    "control": {"core", "plugins", "text", "cluster", "state"},
    "api": {"core", "text"},
    "server": {"core", "text", "cluster", "state", "control", "api"},
    "net": {"core"},
    "draft": {"core", "formats", "text", "ops", "models"},
    "bench": {"core", "text"},
    "node": {
        "core",
        "plugins",
        "kv/blocks",
        "sched",
        "engine",
        "formats",
        "text",
        "ops",
        "kv/transfer",
        "kv/connector/scheduler",
        "kv/connector/worker",
        "models",
        "worker",
        "net",
    },
    "plan": {"core", "plugins", "kv/tiers", "cluster", "sim", "bench", "formats", "text", "models", "node"},
    "kv/store": {"core", "kv/tiers", "kv/transfer", "net", "node"},
    "sandbox": {"core", "formats", "text", "net", "node", "api"},
}
ALLOWED["llm"] = set(ALLOWED) - {"bench", "draft", "sim", "plan"}
WIRING = {"cli"}
ROOMS = {*ALLOWED, *WIRING}
PURE = {"core", "kv/blocks", "kv/events", "kv/tiers", "kv/connector/scheduler", "cluster", "sched", "engine", "sim"}

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


def files(room: str) -> list[Path]:
    paths = sorted((SRC / room).rglob("*.py"))
    return [path for path in paths if room_of(path.relative_to(SRC).parts, ROOMS) == room]


def test_every_file_is_in_a_room() -> None:
    """No file but charters of packages stands outside the house, and no room is empty."""
    outside = [path for path in SRC.rglob("*.py") if room_of(path.relative_to(SRC).parts, ROOMS) is None]
    assert all(path.name == "__init__.py" and not list(imports(path)) for path in outside if path.parent != SRC), (
        outside
    )
    for room in ROOMS:
        assert len(files(room)) > 1, f"room {room} is empty"


def test_no_file_holds_more_than_a_reader_can() -> None:
    """600 lines: what grows beyond that has a second idea in it."""
    sizes = {path.relative_to(SRC): len(path.read_text(encoding="utf8").splitlines()) for path in SRC.rglob("*.py")}
    assert not {str(path): size for path, size in sizes.items() if size > 600}


def test_no_function_holds_more_than_a_reader_can() -> None:
    """60 lines and 10 parameters: what grows beyond that is cut at its ideas, or takes a record of its own."""
    assert not long_functions()
    assert not wide_functions()


def test_no_files_import_each_other_in_a_circle() -> None:
    """A file can be read with those below it alone. Imports inside functions count, and those for types only: what two
    files must know of each other belongs in a third."""
    assert not circles(import_graph())


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest takes the second for the first, which is told only where both are run."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_imports_name_files_that_are_there() -> None:
    """Imports for types only are never made, and mypy passes over a module that is missing."""
    modules = {module_name(path) for path in SRC.rglob("*.py")}
    wrong = [
        f"{path.relative_to(SRC)}:{line} imports {name}"
        for path in SRC.rglob("*.py")
        for name, line in imports(path)
        if name.split(".")[0] == SRC.name and name not in modules and name.rpartition(".")[0] not in modules
    ]
    assert not wrong


def test_imports_follow_the_table() -> None:
    """A room imports only the rooms below it."""
    assert not upward_arrows(ALLOWED, WIRING)


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
