"""docs/develop/write-a-policy.md, followed to the letter in a copy of the source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "develop" / "write-a-policy.md"
ROOMS = ("core", "kv", "sched", "cluster", "engine", "sim")


def test_the_page_works_as_written(tmp_path: Path) -> None:
    """A python block is the file named before it, a diff block adds lines to it, a console block runs."""
    for room in ROOMS:
        shutil.copytree(ROOT / "src/tokenmill" / room, tmp_path / "src/tokenmill" / room)
    shutil.copy(ROOT / "src/tokenmill/__init__.py", tmp_path / "src/tokenmill")
    # An editable install finds the package where it was installed from, whatever the path says.
    (tmp_path / "src/sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in type(each).__module__]\n",
        "utf8",
    )
    (tmp_path / "tests/unit").mkdir(parents=True)
    shutil.copy(ROOT / "tests/ledger.py", tmp_path / "tests")
    path, num_run = tmp_path, 0
    parts = re.findall(r"^([^\n]*\.py`[^\n]*)$|^```(\w+)\n(.*?)^```$", PAGE.read_text("utf8"), re.M | re.S)
    for line, kind, block in parts:
        if line:
            path = tmp_path / re.findall(r"`([^`]+\.py)`", line)[-1]
        elif kind == "python":
            assert not path.exists(), path
            path.write_text(block, "utf8")
        elif kind == "diff":
            add_lines(path, block)
        else:
            assert kind == "console"
            run(tmp_path, block)
            num_run += 1
    assert num_run == 3


def add_lines(path: Path, diff: str) -> None:
    """Lines that begin with + come after those before them, which are there once."""
    kept = "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] == " ")
    text = path.read_text("utf8")
    assert text.count(kept) == 1, f"{path.name} has no {kept!r}"
    path.write_text(text.replace(kept, "".join(line[1:] for line in diff.splitlines(keepends=True))), "utf8")


def run(folder: Path, block: str) -> None:
    command = block.removeprefix("$ ").split()
    assert command[0] == "python"
    paths = os.pathsep.join(str(folder / name) for name in ("src", "tests"))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
