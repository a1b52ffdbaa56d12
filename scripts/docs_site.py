"""A hook of mkdocs that makes a site of docs/ and of the pages beside it (mkdocs.yml).

The pages are copied into a folder `pages` beside the site, and README.md, CHANGELOG.md and CONTRIBUTING.md, which live
above docs/, with them. Links to other files of the checkout lead to the repository (`repo_url`); without one they
become plain text. The navigation is the list of docs/README.md.
"""

from __future__ import annotations

import posixpath
import re
import shutil
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
                return f"{link['before']}{posixpath.relpath(made[each], here)}{link['anchor'] or ''})"
        return f"{link['before']}{repository}/blob/HEAD/{target}{link['anchor'] or ''})" if repository else link["text"]

    return _LINK_OR_CODE.sub(lead, text)


def _nav() -> list[dict[str, list[str]]]:
    """Sections and pages in the order in which docs/README.md has them."""
    nav = [{"Start": ["README.md", "start.md", "changelog.md"]}]
    for section in re.split(r"^## ", (ROOT / "docs" / "README.md").read_text(encoding="utf8"), flags=re.M)[1:]:
        pages = re.findall(r"\]\(((?!\.\.)[\w./-]+\.md)\)", section)
        nav.append({section.partition(":")[0]: list(dict.fromkeys(pages))})
    return [*nav, {"Contribute": ["contributing.md"]}]
