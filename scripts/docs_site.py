"""A hook of mkdocs that makes a site of docs/ and of the pages beside it (mkdocs.yml).

The pages are copied into a folder `pages` beside the site, and README.md, CHANGELOG.md and CONTRIBUTING.md, which live
above docs/, with them. Links to other files of the checkout lead to the repository (`repo_url`); without one they
become plain text. The navigation is the list of docs/README.md. In a translation, what leads to a page leads to its
translation where there is one, and headings have the anchors of the original's too.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ABOVE = {"README": "start", "CHANGELOG": "changelog", "CONTRIBUTING": "contributing"}
"""Pages above docs/, and what they are called in the site. A translation has its language before the suffix:
README.zh.md."""

_LINK_OR_CODE = re.compile(
    r"^```.*?^```|`[^`\n]+`"
    r"|(?P<before>!?\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\()(?P<to>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)",
    re.M | re.S,
)
_HEADING_OR_CODE = re.compile(r"^```.*?^```|^(?P<level>##+) (?P<heading>[^\n]+)", re.M | re.S)


def on_config(config: Any) -> Any:
    pages = Path(config.site_dir).parent / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages)
    made = {f"docs/{path.relative_to(pages)}": str(path.relative_to(pages)) for path in pages.rglob("*.*")}
    for path in ROOT.glob("*.md"):
        stem, _, language = path.name.removesuffix(".md").partition(".")
        if stem in ABOVE:
            made[path.name] = ".".join(filter(None, (ABOVE[stem], language, "md")))
    for source, page in made.items():
        if source.endswith(".md"):
            text = (ROOT / source).read_text(encoding="utf8")
            original, language = _language(source)
            if language:
                text = _with_anchors(text, (ROOT / original).read_text(encoding="utf8"))
            (pages / page).write_text(_with_links(text, source, made, config.repo_url or ""), encoding="utf8")
    config.docs_dir = str(pages)
    config.nav = _nav()
    return config


def _with_links(text: str, source: str, made: dict[str, str], repository: str) -> str:
    """The page `source` with links that hold in the site. made: its pages and pictures, by their places in the
    checkout."""

    def lead(link: re.Match[str]) -> str:
        if not link["to"] or ":" in link["to"]:
            return link[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["to"]))
        for each in (target, f"{target}/README.md"):
            if each in made:
                here = posixpath.dirname(made[source]) or "."
                page, language = _language(each)
                if language != _language(source)[1] and (language or page == _language(source)[0]):
                    # mkdocs builds each language by itself, and knows no pages of others.
                    to = posixpath.relpath(_address(made[each]), _address(made[source]))
                    return f'<a href="{to}/{link["anchor"] or ""}">{link["text"]}</a>'
                return f"{link['before']}{posixpath.relpath(made[each], here)}{link['anchor'] or ''})"
        return f"{link['before']}{repository}/blob/HEAD/{target}{link['anchor'] or ''})" if repository else link["text"]

    return _LINK_OR_CODE.sub(lead, text)


def _language(page: str) -> tuple[str, str]:
    """A page's original and its language: README.md and zh of README.zh.md. An original has no language."""
    found = re.fullmatch(r"(.*)\.([a-z]{2})\.md", page)
    return (f"{found[1]}.md", found[2]) if found else (page, "")


def _address(page: str) -> str:
    """Where the site has a page: zh/use/tools for use/tools.zh.md."""
    original, language = _language(page)
    return posixpath.join("/", language, re.sub(r"(^|/)README$", "", original.removesuffix(".md")))


def _with_anchors(text: str, original: str) -> str:
    """A translation with the anchors that the headings of its original have in the site, beside its own."""
    anchors: list[str] = []
    for heading in _HEADING_OR_CODE.finditer(original):
        if heading["level"]:
            name = _anchor(heading["heading"])
            names = [name, *(f"{name}_{num}" for num in range(1, len(anchors) + 1))]
            anchors.append(next(each for each in names if each not in anchors))
    given = iter(anchors)

    def mark(heading: re.Match[str]) -> str:
        anchor = next(given, "") if heading["level"] else ""
        if not anchor or anchor == _anchor(heading["heading"]):
            return heading[0]
        return f'{heading["level"]} <a id="{anchor}"></a>{heading["heading"]}'

    return _HEADING_OR_CODE.sub(mark, text)


def _anchor(heading: str) -> str:
    """As mkdocs names it."""
    plain = unicodedata.normalize("NFKD", re.sub(r"\]\([^)]*\)", "", heading)).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _nav() -> list[dict[str, list[str]]]:
    """Sections and pages in the order in which docs/README.md has them."""
    nav = [{"Start": ["README.md", "start.md", "changelog.md"]}]
    for section in re.split(r"^## ", (ROOT / "docs" / "README.md").read_text(encoding="utf8"), flags=re.M)[1:]:
        pages = re.findall(r"\]\(((?!\.\.)[\w./-]+\.md)\)", section)
        nav.append({section.partition(":")[0]: list(dict.fromkeys(pages))})
    return [*nav, {"Contribute": ["contributing.md"]}]
