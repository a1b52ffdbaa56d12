"""The commands that README and the pages of docs tell, as they stand there."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHELLS = ("console", "sh", "bash")
_STARTS = ("tokenmill ", "curl ", "head ", "export ", "for ", "openssl ", "python ", "make ")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_INDENTED = re.compile(r"(?:^|\n\n)((?:    \S.*\n)+)")


@dataclass(frozen=True)
class Block:
    """kind: "shell" or "python"."""

    kind: str
    text: str


def pages() -> list[Path]:
    """Of the language that is the original."""
    docs = (path for path in (ROOT / "docs").rglob("*.md") if path.name.count(".") == 1)
    return [ROOT / "README.md", *sorted(docs)]


def blocks(page: Path) -> Iterator[Block]:
    """Commands and programs, in the order in which the page has them."""
    text = page.read_text(encoding="utf8")
    for fence in _FENCE.finditer(text):
        kind, body = fence.groups()
        if kind == "python":
            yield Block("python", body)
        elif kind == "console":
            yield Block("shell", "\n".join(_session(body)[0]))
        elif kind in SHELLS or (not kind and body.startswith(_STARTS)):
            yield Block("shell", body)


def shown(page: Path) -> Iterator[re.Pattern[str]]:
    """What each line looks for that the page shows as printed at a terminal: three dots stand for anything, and a word
    with a digit for any word."""
    for kind, body in _FENCE.findall(page.read_text(encoding="utf8")):
        if kind == "console":
            for line in _session(body)[1]:
                parts = re.split(r"(\.\.\.|\s+|\S*\d\S*)", line.strip())
                yield re.compile("".join(_loosened(part) for part in parts))


def _loosened(part: str) -> str:
    if part == "...":
        return ".*"
    if part.isspace():
        return r"\s+"
    return r"\S+" if re.search(r"\d", part) else re.escape(part)


def _session(body: str) -> tuple[list[str], list[str]]:
    """The commands of a session at a terminal, and the lines that are printed."""
    commands, printed = [], []
    lines = iter(body.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while _goes_on(command):
                command += "\n" + next(lines)
            commands.append(command)
        elif line.strip(". "):
            printed.append(line)
    return commands, printed


def _goes_on(command: str) -> bool:
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command, comments=True)
    except ValueError:  # a quotation is open
        return True
    return False


_RECORD = """
tokenmill() { printf '%s\\0' "$@" $'\\x1e' >&9; }
command_not_found_handle() { :; }
PATH=/nowhere KEY=key ADMIN=key ALICE=key BOB=key REFUSED=key
"""
"""Of what a shell is asked to run, only the words of `tokenmill` commands are noted. Without a newline, at which bash
would write them in two parts, between which a command in the background could write its own."""


def program_lines(page: Path, folder: Path) -> list[list[str]]:
    """The words of each `tokenmill` command of a page, also of those that are only indented, as a shell hands them
    over. `folder`: for files that a command would make."""
    text = page.read_text(encoding="utf8")
    shells = [block.text for block in blocks(page) if block.kind == "shell"]
    indented = (re.sub(r"^    ", "", each, flags=re.M) for each in _INDENTED.findall(_FENCE.sub("", text)))
    # What a command means stands beside it, after spaces.
    shells += [re.sub(r"(?<=\S)  +[^-\s].*$", "", each, flags=re.M) for each in indented if each.startswith(_STARTS)]
    noted = folder / "noted"
    noted.write_bytes(b"")
    for shell in shells:
        script = f"exec 9>>{shlex.quote(str(noted))}\n{_RECORD}\n{shell}\nwait\n"
        subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    return [each.split("\0")[:-1] for each in noted.read_text(encoding="utf8").split("\x1e\0")[:-1]]
