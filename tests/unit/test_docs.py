"""The pages of docs: links lead somewhere, and the list of pages is whole."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]


def links(page: Path) -> Iterator[Path]:
    """The files that a page links to."""
    for target in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf8")):
        if "://" not in target and not target.startswith(("mailto:", "/")):
            yield (page.parent / target).resolve()


def test_links_lead_to_files() -> None:
    broken = [f"{page.relative_to(ROOT)}: {to}" for page in pages() for to in links(page) if not to.exists()]
    assert not broken


def test_every_page_is_listed() -> None:
    listed = {*links(DOCS / "README.md"), *links(DOCS / "develop" / "decisions" / "README.md")}
    reports = DOCS / "develop" / "reports"
    missing = {page for page in DOCS.rglob("*.md") if reports not in page.parents} - listed - {DOCS / "README.md"}
    assert not missing
