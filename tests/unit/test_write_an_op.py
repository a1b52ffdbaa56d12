"""docs/develop/write-an-op.md shows lines of an operation that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ("op_rows.cpp", "rows.inc", "kernels.h", "kernels.inc")


def test_the_page_shows_the_code_as_it_is() -> None:
    """Each line of each example stands in one of the files that the page names."""
    page = (ROOT / "docs/develop/write-an-op.md").read_text(encoding="utf8")
    named = [ROOT / path for path in re.findall(r"`((?:src|tests)/[a-z_/]+\.py)`", page)]
    sources = {
        line.strip()
        for path in [*named, *(ROOT / "native/src" / name for name in NATIVE)]
        for line in path.read_text(encoding="utf8").splitlines()
    }
    examples = re.findall(r"```(?:python|cpp)\n(.*?)```", page, flags=re.DOTALL)
    shown = [line.strip() for example in examples for line in example.splitlines() if line.strip()]
    assert len(named) == 6 and len(examples) == 5, (named, len(examples))
    assert not set(shown) - sources, set(shown) - sources
