"""The console's files as the server gives them: headers, no key needed, nothing but themselves; and reports."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripted import Served
from tokenmill.server.console.routes import FOLDER

OWN = [path for path in sorted(FOLDER.rglob("*")) if path.is_file() and "vendor" not in path.parts]

POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src 'self' data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports: two that are, and what is none."""
    root = tmp_path_factory.mktemp("reports")
    inside = root / "inside"
    inside.mkdir()
    (root / "secret.json").write_text('{"kind": "run", "schema": 2}')
    (inside / "old.json").write_text('{"schema": 1, "kind": "engine", "more": [1]}')
    (inside / "new.json").write_text('{"schema": 2, "kind": "run", "name": "a", "started_at": "now"}')
    (inside / "list.json").write_text("[]")
    (inside / "half.json").write_text('{"kind": ')
    (inside / "text.txt").write_text('{"kind": "run"}')
    (inside / "out.json").symlink_to(root / "secret.json")
    os.utime(inside / "old.json", (1, 1))
    return inside


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with Served(api_keys=("sesame",), reports_dir=str(folder)) as running:
        yield running


def ask(served: Served, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    """The answer, its body read."""
    connection = http.client.HTTPConnection(*served.address, timeout=20)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        answer.body = answer.read()  # type: ignore[attr-defined]
        return answer
    finally:
        connection.close()


def test_every_file_is_served_open_and_locked_down(served: Served) -> None:
    """No key, the right type, and a policy that lets the page load and call this server alone."""
    for path in [FOLDER, *OWN]:
        name = "" if path == FOLDER else path.relative_to(FOLDER).as_posix()
        answer = ask(served, f"/console/{name}")
        assert answer.status == 200, name
        policy = answer.getheader("content-security-policy") or ""
        for part in POLICY:
            assert part in policy.split("; ")
        assert "unsafe" not in policy and answer.getheader("x-content-type-options") == "nosniff"
    for path in ("/docs", "/openapi.json"):
        assert ask(served, path).headers.get_all("x-content-type-options") == ["nosniff"], "once"
    assert ask(served, "/console/app.js").getheader("content-type") == "text/javascript; charset=utf-8"


def test_a_browser_is_led_to_the_console_and_others_are_not(served: Served) -> None:
    """By its Accept header at /, and from /console to the folder that the files are named by."""
    seen = ask(served, "/", accept="text/html,application/xhtml+xml")
    assert (seen.status, seen.getheader("location")) == (307, "console/")
    assert ask(served, "/", accept="*/*").body.startswith(b"Ollama is running")  # type: ignore[attr-defined]
    assert ask(served, "/console").getheader("location") == "console/"


def test_a_file_that_has_not_changed_is_not_sent_again(served: Served) -> None:
    etag = ask(served, "/console/app.js").getheader("etag")
    assert etag and etag.startswith('W/"'), "it is that of the file compressed too"
    packed = ask(served, "/console/app.js", accept_encoding="gzip")
    assert packed.getheader("content-encoding") == "gzip" and packed.getheader("etag") == etag
    for named in (etag, etag.removeprefix("W/"), f'"other", {etag}', "*"):
        assert ask(served, "/console/app.js", if_none_match=named).status == 304, named
        assert ask(served, "/console/app.js", if_none_match=named, accept_encoding="gzip").status == 304, named
    for other in ('"other"', etag[:-1], ""):
        assert ask(served, "/console/app.js", if_none_match=other).status == 200, other


@pytest.mark.parametrize(
    "path", ["nothing.js", "../app.py", "..%2f__init__.py", "%2e%2e/pages.py", "pages/", "/etc/passwd", "app.js%00"]
)
def test_nothing_outside_the_folder_is_served(served: Served, path: str) -> None:
    answer = ask(served, f"/console/{path}")
    assert answer.status in (400, 404) and b"root:" not in answer.body  # type: ignore[attr-defined]
    assert ask(served, f"/console/{path}", accept="text/html").status == answer.status
    if answer.status == 404:
        assert "default-src 'none'" in (answer.getheader("content-security-policy") or "")


@pytest.mark.parametrize("path", [path.relative_to(FOLDER).as_posix() for path in OWN])
def test_files_parse_no_html_and_name_no_other_place(path: str) -> None:
    """What a model or a user said becomes text nodes; no script or style is inline; nothing comes from elsewhere."""
    text = (FOLDER / path).read_text(encoding="utf8")
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|srcdoc|eval\("
    assert not re.search(sinks + r"|new Function|javascript:|setHTML", text)
    assert not re.search(r"document\.cookie|indexedDB", text)
    assert "sessionStorage" not in text or path == "lib/api.js"
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*", text)) - {"http://www.w3.org/2000/svg"}
    assert not addresses
    if path.endswith(".html"):
        assert "<style" not in text and not re.search(r"\s(on\w+|style)=", text)
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to link the modules with")
def test_modules_parse_and_import_what_others_export(tmp_path: Path) -> None:
    """Also where no browser is there to find it out. They are linked as a whole; without a page they cannot run."""
    shutil.copytree(FOLDER, tmp_path / "static")
    (tmp_path / "static" / "package.json").write_text('{"type": "module"}')
    script = """import("./app.js").then(() => "ran", (error) => `${error.name} ${error.code ?? ""} ${error.message}`)
      .then(console.log)"""
    done = subprocess.run(
        ["node", "-e", script], cwd=tmp_path / "static", capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout and not re.search("SyntaxError|ERR_MODULE", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("name", "script", "licence"), [("uplot", "uPlot.esm.js", "MIT License"), ("marked", "marked.esm.js", "MarkedJS")]
)
def test_libraries_keep_their_licences(name: str, script: str, licence: str) -> None:
    vendored = FOLDER / "vendor" / name
    assert licence in (vendored / "LICENSE").read_text()
    assert "innerHTML" not in (vendored / script).read_text()
    project = (FOLDER.parents[4] / "pyproject.toml").read_text()
    assert f"vendor/{name}/LICENSE" in project


@pytest.mark.parametrize("path", ["/admin/kv", "/admin/reports", "/admin/reports/old.json"])
def test_views_are_not_for_everyone(served: Served, path: str) -> None:
    """Neither without a key nor with one that has no scope."""
    assert ask(served, path).status == 401
    assert ask(served, path, authorization="Bearer sesame").status == 403


def test_a_report_is_sent_as_it_is_and_nothing_else_is(folder: Path) -> None:
    """The latest first; what is no report, or lies outside the folder, is not there."""
    with Served(reports_dir=str(folder)) as open_to_all:
        listed = json.loads(open_to_all.ask("/admin/reports")[1])["data"]
        shown = [(each["id"], each["kind"], each["name"]) for each in listed]
        assert shown == [("new.json", "run", "a"), ("old.json", "engine", "")]
        status, text, kind = open_to_all.ask("/admin/reports/old.json")
        assert (status, text, kind) == (200, (folder / "old.json").read_text(), "application/json")
        for name in (
            "none.json",
            "out.json",
            "text.txt",
            "..%2fsecret.json",
            "%2e%2e",
            "old.json%00",
            "x" * 500 + ".json",
        ):
            assert open_to_all.ask(f"/admin/reports/{name}")[0] == 404, name
    with Served() as without:
        assert json.loads(without.ask("/admin/reports")[1])["data"] == []
        assert "--reports-dir" in without.ask("/admin/reports/old.json")[1]


def colours(theme: str) -> dict[str, str]:
    """The variables of a theme, those of the light one below."""
    text = (FOLDER / "style.css").read_text(encoding="utf8")
    light = dict(re.findall(r"--([\w-]+): (#\w{6});", text.split("@media")[0]))
    if theme == "light":
        return light
    chosen, system = text.split(':root[data-theme="dark"] {')[1], text.split(':root:not([data-theme="light"]) {')[1]
    found = [dict(re.findall(r"--([\w-]+): (#\w{6});", part.split("}")[0])) for part in (chosen, system)]
    assert found[0] == found[1], "dark by choice is as dark by the system"
    return light | found[0]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_stand_out_from_their_grounds(theme: str) -> None:
    """WCAG 2.2 AA: 4.5 to 1 for texts, 3 to 1 for borders of controls and lines of charts."""
    known = colours(theme)
    texts = [(text, ground) for text in ("text", "muted", "accent") for ground in ("bg", "surface")]
    texts += [("text", "sunken"), ("text", "accent-soft"), ("accent", "accent-soft"), ("accent-text", "accent")]
    texts += [("ok", "sunken"), ("ok", "surface"), ("warn", "warn-soft"), ("bad", "bad-soft"), ("bad", "surface")]
    lines = [(line, "surface") for line in ("line-strong", "series-1", "series-2", "series-3")]
    weak = {}
    for pairs, least in ((texts, 4.5), (lines, 3.0)):
        for one, other in pairs:
            low, high = sorted((luminance(known[one]), luminance(known[other])))
            if (ratio := (high + 0.05) / (low + 0.05)) < least:
                weak[one, other] = round(ratio, 2)
    assert not weak
