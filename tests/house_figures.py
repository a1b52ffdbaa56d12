"""Figures of the house, from the source alone: `python tests/house_figures.py [SRC]` prints them, the worst by name.

They are signs of how much a reader must hold at once: files and lines, long functions, many parameters, files that
import each other in a circle, rooms that import what lies above them, and small files that only one other imports.
`tests/test_house.py` takes its functions from here and forbids what must not be.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent / "src" / "tokenmill"
MOST_LINES, MOST_PARAMETERS, CRUMB_LINES = 60, 10, 80

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf8"))


def sources(src: Path = SRC) -> list[Path]:
    return sorted(path for path in src.rglob("*.py") if "__pycache__" not in path.parts)


def module_name(path: Path, src: Path = SRC) -> str:
    parts = path.relative_to(src.parent).with_suffix("").parts
    return ".".join(parts[:-1] if path.name == "__init__.py" else parts)


def imports(path: Path, src: Path = SRC) -> Iterator[tuple[str, int]]:
    """Every imported name as an absolute dotted name, with its line; imports inside functions count."""
    package = path.parent.relative_to(src.parent).parts
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *(node.module.split(".") if node.module else ())))
            for alias in node.names:
                yield f"{stem}.{alias.name}", node.lineno


def import_graph(src: Path = SRC) -> dict[str, set[str]]:
    """The modules of `src` that each module names in its imports."""
    modules = {module_name(path, src): path for path in sources(src)}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        named = (name if name in modules else name.rpartition(".")[0] for name, _ in imports(path, src))
        graph[module] = {name for name in named if name in modules and name != module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected sets of more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10 * len(graph)))
    try:
        for module in sorted(graph):
            if module not in index:
                visit(module)
    finally:
        sys.setrecursionlimit(limit)
    return found


def functions(src: Path = SRC) -> Iterator[tuple[str, Function]]:
    """Every function and method with its place, `room/file.py:line name`."""
    for path in sources(src):
        for node in ast.walk(tree(path)):
            if isinstance(node, Function):
                yield f"{path.relative_to(src)}:{node.lineno} {node.name}", node


def num_lines(function: Function) -> int:
    """Lines from `def` to the end, decorators left out."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def num_parameters(function: Function) -> int:
    """Parameters that a caller names, `self` and `cls` left out."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([a for a in named if a.arg not in ("self", "cls")]) + sum(
        a is not None for a in (arguments.vararg, arguments.kwarg)
    )


def long_functions(src: Path = SRC) -> dict[str, int]:
    return {place: num_lines(f) for place, f in functions(src) if num_lines(f) > MOST_LINES}


def wide_functions(src: Path = SRC) -> dict[str, int]:
    return {place: num_parameters(f) for place, f in functions(src) if num_parameters(f) > MOST_PARAMETERS}


def room_of(parts: Sequence[str], rooms: Collection[str]) -> str | None:
    """The room that a file or module lies in: the longest of their names that its path begins with."""
    names = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if name in rooms), None)


def upward_arrows(allowed: Mapping[str, Collection[str]], wiring: Collection[str], src: Path = SRC) -> list[str]:
    """Imports of a room that the table does not let it see. Rooms of `wiring` may see all."""
    rooms, wrong = {*allowed, *wiring}, []
    for path in sources(src):
        room = room_of(path.relative_to(src).parts, rooms)
        for module, line in imports(path, src) if room in allowed else ():
            package, *parts = module.split(".")
            target = room_of(parts, rooms) if package == src.name else None
            if target not in (room, None) and target not in allowed[room]:
                wrong.append(f"{path.relative_to(src)}:{line} imports {module}")
    return wrong


def crumbs(src: Path = SRC) -> dict[str, int]:
    """Lines of files of at most 80 lines that exactly one other file imports, `__init__.py` left out."""
    graph = import_graph(src)
    importers: dict[str, int] = dict.fromkeys(graph, 0)
    for targets in graph.values():
        for target in targets:
            importers[target] += 1
    sizes = {
        module_name(path, src): len(path.read_text(encoding="utf8").splitlines())
        for path in sources(src)
        if path.name != "__init__.py"
    }
    return {module: size for module, size in sizes.items() if size <= CRUMB_LINES and importers[module] == 1}


def main() -> None:
    from test_house import ALLOWED, WIRING

    src = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else SRC
    paths = sources(src)
    lines = sum(len(path.read_text(encoding="utf8").splitlines()) for path in paths)
    print(f"files; lines in src: {len(paths)}; {lines}")
    for title, found in (
        (f"functions over {MOST_LINES} lines", long_functions(src)),
        (f"functions over {MOST_PARAMETERS} parameters", wide_functions(src)),
    ):
        print(f"{title}: {len(found)}")
        for place, size in sorted(found.items(), key=lambda item: -item[1]):
            print(f"  {size:4} {place}")
    rings = circles(import_graph(src))
    print(f"import circles between files: {len(rings)}")
    for ring in rings:
        print(f"  {', '.join(ring)}")
    arrows = upward_arrows(ALLOWED, WIRING, src)
    print(f"upward arrows: {len(arrows)}")
    for arrow in arrows:
        print(f"  {arrow}")
    small = crumbs(src)
    print(f"files of at most {CRUMB_LINES} lines with one importer: {len(small)} ({sum(small.values())} lines)")


if __name__ == "__main__":
    main()
