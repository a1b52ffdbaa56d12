"""The pages of docs: links lead somewhere, the list of pages is whole, and pictures and names of files are of today."""

import os
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import doc_commands
from tokenmill.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]


def links(page: Path) -> Iterator[Path]:
    """The files that a page links to."""
    for target in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf8")):
        if "://" not in target and not target.startswith(("mailto:", "/")):
            yield (page.parent / target).resolve()


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*.*") if "__pycache__" not in path.parts)


def test_links_lead_to_files() -> None:
    broken = [f"{page.relative_to(ROOT)}: {to}" for page in pages() for to in links(page) if not to.exists()]
    assert not broken


def translations() -> set[Path]:
    """Pages with a language before their suffix: tools.zh.md."""
    return {page for page in pages() if re.fullmatch(r"[^.]+\.[a-z]{2}\.md", page.name)}


def outline(page: Path) -> tuple[list[str], list[str], set[str], set[str]]:
    """What a translation has as the original has it: levels of headings, blocks of code without their comments, code in
    the text, and where links lead."""
    text = page.read_text(encoding="utf8")
    blocks = [re.sub(r"(^|\s+)# .*$", "", block, flags=re.M) for block in re.findall(r"^```.*?^```", text, re.M | re.S)]
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^(#+) ", text, re.M)
    targets = re.findall(r"\]\(([^)\s#]+)", text)
    leads = {re.sub(r"\.[a-z]{2}\.md$", ".md", target) for target in targets}
    return headings, blocks, {" ".join(each.split()) for each in re.findall(r"`([^`]+)`", text)}, leads


def test_translations_say_what_the_originals_say() -> None:
    """As far as headings, commands, names and links tell."""
    for page in translations():
        original = page.with_name(page.name.split(".")[0] + ".md")
        names = ("headings", "blocks of code", "names in the text", "links")
        for what, own, given in zip(names, outline(page), outline(original), strict=True):
            differ = set(own) ^ set(given)
            where = f"{page.relative_to(ROOT)} and {original.name} differ in their {what}"
            assert own == given, f"{where}: {sorted(differ) or (len(own), len(given))}"


def test_every_page_is_listed() -> None:
    listed = {*links(DOCS / "README.md"), *links(DOCS / "develop" / "decisions" / "README.md")}
    reports = DOCS / "develop" / "reports"
    originals = {page for page in DOCS.rglob("*.md") if reports not in page.parents and page not in translations()}
    missing = originals - listed - {DOCS / "README.md"}
    assert not missing


def test_pictures_are_drawn_from_the_house_as_it_is() -> None:
    drawn = runpy.run_path(str(ROOT / "scripts" / "make_diagrams.py"))
    for path, draw in drawn["PICTURES"].items():
        assert path.read_text(encoding="utf8") == draw(), f"run scripts/make_diagrams.py: {path.name} is of another day"
    stops = [*drawn["FRONT_END"], *drawn["ENGINE"], *drawn["ANSWER"]]
    assert not [file for file, _ in stops if not (ROOT / "src" / "tokenmill" / file).exists()]


# Pages that have the reader make files.
MAKES_FILES = {"write-a-policy.md", "try-a-policy.md"}


def test_files_that_pages_about_the_code_name_are_there() -> None:
    """`room/file.py` below the root, src/tokenmill or any folder; `file.py` alone anywhere."""
    there = {
        f"/{path.relative_to(ROOT)}"
        for top in ("src", "tests", "scripts", "native", "deploy", "docs")
        for path in files(ROOT / top)
    }
    missing = []
    for page in [*(DOCS / "develop").rglob("*.md"), DOCS / "architecture.md", ROOT / "CONTRIBUTING.md"]:
        names = re.findall(
            r"(?<![\w./-])((?:\w+/)*\w+\.py|(?:\w+/)+\w+\.(?:cpp|inc))\b", page.read_text(encoding="utf8")
        )
        if page.name not in MAKES_FILES:
            missing += [f"{page.name}: {name}" for name in names if not any(one.endswith(f"/{name}") for one in there)]
    assert not missing


def test_central_types_are_where_the_table_says() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf8")
    rows = re.findall(r"^\| ([\w, ]+) \| ([\w/., ]+) \|", text.split("## Central types")[1].split("\n## ")[0], re.M)
    wrong, folder = [], ROOT
    for names, places in rows[1:]:
        source = ""
        for place in places.split(", "):
            folder = (ROOT / "src" / "tokenmill" / place).parent if "/" in place else folder
            path = folder / Path(place).name
            files = sorted(path.glob("*.py")) if path.is_dir() else [path] if path.is_file() else []
            wrong += [] if files else [place]
            source += "\n".join(file.read_text(encoding="utf8") for file in files)
        wrong += [name for name in names.split(", ") if not re.search(rf"^(class )?{name}\b( =|\(|:)", source, re.M)]
    assert len(rows) > 60 and not wrong


def test_every_command_is_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tests/live/test_docs_commands.py runs those of some pages."""
    refused, num = [], 0
    for page in doc_commands.pages():
        for words in doc_commands.program_lines(page, tmp_path):
            num += 1
            try:
                cli._parser(words).parse_args(words)
            except SystemExit as ended:
                said = capsys.readouterr().err
                refused += [f"{page.relative_to(ROOT)}: {' '.join(words)}\n    {said}"] if ended.code else []
    assert num > 100 and not refused, "\n".join(refused)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    mkdocs = ROOT / ".venv-site" / "bin" / "mkdocs"
    if not mkdocs.exists():
        pytest.skip("mkdocs is not installed: make site installs it")
    done = subprocess.run(
        [mkdocs, "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "operate" / "deploy" / "index.html").is_file()
    start, translated = (
        (tmp_path / "site" / folder / "start" / "index.html").read_text(encoding="utf8") for folder in (".", "zh")
    )
    assert '<a href="../zh/start/">' in start and '<a href="../../start/">' in translated
    assert '<a id="what-works"></a>' in translated
