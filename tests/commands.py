"""A command of the program run in this process: what a user sees of it, without the start of another Python."""

from __future__ import annotations

import contextlib
import io
import subprocess

from tokenmill.cli.main import main


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    """`tokenmill WORDS`: its exit code and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as ended:  # of the parser
            code = ended.code if isinstance(ended.code, int) else 1
    return subprocess.CompletedProcess(list(words), code, out.getvalue(), err.getvalue())
