"""The pages of docs: links lead somewhere, the list of pages is whole, and pictures and names of files are of today."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_pictures_are_drawn_from_the_house_as_it_is() -> None:
    drawn = runpy.run_path(str(ROOT / "scripts" / "make_diagrams.py"))
    for path, draw in drawn["PICTURES"].items():
        assert path.read_text(encoding="utf8") == draw(), f"run scripts/make_diagrams.py: {path.name} is of another day"
    stops = [*drawn["FRONT_END"], *drawn["ENGINE"], *drawn["ANSWER"]]
    assert not [file for file, _ in stops if not (ROOT / "src" / "tokenmill" / file).exists()]


@pytest.mark.parametrize("page", ["architecture.md", "develop/tour.md"])
def test_files_that_a_page_names_are_there(page: str) -> None:
    """`room/file.py` from the root, src/tokenmill or tests; `file.py` alone anywhere below these."""
    there = [path for top in ("src", "tests", "scripts", "native") for path in (ROOT / top).rglob("*.*")]
    paths = {str(path.relative_to(ROOT)) for path in there}
    paths |= {name.removeprefix("src/tokenmill/") for name in paths}
    names = set(re.findall(r"`([\w/]+\.(?:py|cpp|h|inc))`", (DOCS / page).read_text(encoding="utf8")))
    missing = [name for name in names if name not in paths and ("/" in name or not any(p.name == name for p in there))]
    assert not sorted(missing)
