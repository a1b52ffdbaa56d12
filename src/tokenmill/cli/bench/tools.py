"""`bench tools`: hands over to the bench room."""

from __future__ import annotations

import argparse

from ...bench.tools import run


def tools(args: argparse.Namespace) -> int:
    return run(args)
