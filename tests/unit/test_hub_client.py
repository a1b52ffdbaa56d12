"""Downloads that go on where they stopped and are what the hub tells, and what is said when it refuses."""

from __future__ import annotations

import errno
import json
import os
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from fake_hub import FakeHub, fake_hub
from ports import free_port
from tokenmill.core.errors import FetchError
from tokenmill.formats import hub_client
from tokenmill.formats.digest import hash_file
from tokenmill.formats.hub_client import FoundModel, download, repository_files, require_room, search_models
from tokenmill.formats.model_names import HubName, UrlName

DATA = bytes(range(256)) * 400
NAME = "M-Q8_0.gguf"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
        server.files[NAME] = DATA
        yield server


def fetch(target: Path, seen: list[int] | None = None) -> str:
    return download(repository_files(HubName("org/x"))[NAME], target, ([] if seen is None else seen).append)


def left(folder: Path) -> list[int]:
    return [file.stat().st_size for file in folder.glob(".*.part") if not file.match("*.etag.part")]


def test_a_connection_that_breaks_is_made_again(server: FakeHub, tmp_path: Path) -> None:
    """What has come is not asked for twice, and progress never falls."""
    server.cuts = [40_000, 10_000]
    seen: list[int] = []
    assert fetch(tmp_path / "m.gguf", seen) == hash_file(tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == DATA and not left(tmp_path)
    assert server.downloads() == ["", "bytes=40000-", "bytes=50000-"]
    assert seen == sorted(seen) and seen[-1] == len(DATA)


def test_a_later_fetch_goes_on_where_an_earlier_one_stopped(server: FakeHub, tmp_path: Path) -> None:
    server.cuts = [30_000, 0, 0, 0, 0]
    with pytest.raises(FetchError, match=r"broke off after 29.3 KiB of 100.0 KiB.*kept"):
        fetch(tmp_path / "m.gguf")
    assert left(tmp_path) == [30_000] and not (tmp_path / "m.gguf").exists()
    server.calls.clear()
    fetch(tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == DATA and server.downloads() == ["bytes=30000-"]


def test_what_came_of_another_version_is_not_gone_on_with(server: FakeHub, tmp_path: Path) -> None:
    server.cuts = [30_000, 0, 0, 0, 0]
    with pytest.raises(FetchError):
        fetch(tmp_path / "m.gguf")
    server.files[NAME] = DATA[::-1]
    fetch(tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == DATA[::-1] and not left(tmp_path)


def test_a_server_without_ranges_sends_all_again(server: FakeHub, tmp_path: Path) -> None:
    server.cuts, server.takes_ranges = [30_000], False
    fetch(tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == DATA and server.downloads() == ["", "bytes=30000-"]


@pytest.mark.parametrize("validators", [("ETag",), ("Weak", "Last-Modified"), ("Weak",), ()])
def test_a_file_that_changed_meanwhile_starts_again(
    server: FakeHub, tmp_path: Path, validators: tuple[str, ...]
) -> None:
    """Also where it has no digest by which a mixture of two would show, and the same size. Where the server says
    nothing by which it would know whether it changed, it starts again anyway."""
    server.validators, server.files[NAME] = validators, b"GGUF" + DATA
    file = hub_client.file_at(UrlName(f"{server.url}/storage/{NAME}"))
    server.cuts = [30_000, 10_000, 0, 0, 0, 0]
    is_told = validators in (("ETag",), ("Weak", "Last-Modified"))
    with pytest.raises(FetchError, match="kept" if is_told else "begins anew"):
        download(file, tmp_path / "m.gguf", lambda _: None)
    changed = server.files[NAME] = b"GGUF" + DATA[::-1]
    server.calls.clear(), server.cuts.clear()
    assert download(file, tmp_path / "m.gguf", lambda _: None) == hash_file(tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == changed and len(list(tmp_path.iterdir())) == 1
    assert server.downloads() == (["bytes=40000-"] if is_told else [""])


@pytest.mark.parametrize(("shift", "more"), [(1, b""), (-1, b""), (0, b"x")])
def test_a_rest_that_is_not_what_was_asked_for_is_not_taken(
    server: FakeHub, tmp_path: Path, shift: int, more: bytes
) -> None:
    """It begins elsewhere, or is of a file of another size, from a server that does not obey If-Range."""
    server.takes_conditions, server.shift = False, shift
    server.files[NAME] = b"GGUF" + DATA
    file = hub_client.file_at(UrlName(f"{server.url}/storage/{NAME}"))
    server.cuts = [30_000, *(10 for _ in range(3 if more else 0))]
    server.served[NAME] = server.files[NAME]
    if more:
        hub_client._stream(file, hub_client._part(tmp_path / "m.gguf", file), lambda _: None)
        server.served[NAME] += more
        with pytest.raises(
            FetchError, match="changed while it was fetched: it has 102405 bytes by now, and had 102404"
        ):
            download(file, tmp_path / "m.gguf", lambda _: None)
        assert not list(tmp_path.iterdir()), "the next fetch asks anew what there is"
        return
    download(file, tmp_path / "m.gguf", lambda _: None)
    assert (tmp_path / "m.gguf").read_bytes() == server.files[NAME] and not left(tmp_path)
    assert server.downloads()[1:] == ["", "bytes=30000-", ""]


@pytest.mark.parametrize("name", [NAME, "config.json"])
def test_what_is_not_the_file_of_the_hub_is_not_used(server: FakeHub, tmp_path: Path, name: str) -> None:
    """By SHA-256, or of the small files that the hub keeps in git, by git's digest."""
    server.files[name] = DATA
    server.served[name] = b"x" + DATA[1:]
    with pytest.raises(FetchError, match="does not have the size and digest"):
        download(repository_files(HubName("org/x"))[name], tmp_path / "m", lambda _: None)
    assert not list(tmp_path.iterdir())
    server.served.clear()
    download(repository_files(HubName("org/x"))[name], tmp_path / "m", lambda _: None)
    assert (tmp_path / "m").read_bytes() == DATA


def test_the_token_is_told_to_the_hub_alone(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not to the storage that it sends on to, nor to other servers. A login's token serves where none is set."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(tmp_path / "m.gguf")
    told = {path.split("/")[1]: headers.get("Authorization") for path, headers in server.calls}
    assert told == {"api": "Bearer hf_secret", "org": "Bearer hf_secret", "storage": None}
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "token").write_text("hf_login\n")
    repository_files(HubName("org/x"))
    assert server.calls[-1][1]["Authorization"] == "Bearer hf_login"
    hub_client.file_at(UrlName(server.url.replace("127.0.0.1", "localhost") + "/storage/" + NAME))
    assert "Authorization" not in server.calls[-1][1]


def test_a_secure_address_may_not_lead_to_an_insecure_one() -> None:
    request = urllib.request.Request("https://hub.example/a?key=secret")
    with pytest.raises(FetchError, match="not encrypted") as caught:
        hub_client._Redirects().redirect_request(request, None, 302, "", {}, "http://hub.example/a")  # type: ignore[arg-type]
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("status", "code", "token", "said"),
    [
        (401, "GatedRepo", "", "org/x is gated: accept its licence at .*/org/x with an account, and set HF_TOKEN"),
        (403, "GatedRepo", "t", "accept its licence at .*/org/x with the account of HF_TOKEN\\.$"),
        (401, "RepoNotFound", "", "no model org/x .* or set HF_TOKEN if it is private"),
        (404, "RepoNotFound", "t", "There is no model org/x at .*\\(tokenmill search x\\)\\.$"),
        (404, "", "", "There is no model org/x"),
        (404, "RevisionNotFound", "", "no such revision"),
        (401, "", "t", "does not take HF_TOKEN"),
        (429, "", "", "cannot answer now \\(status 429\\)\\. Try again later"),
        (503, "", "", "cannot answer now \\(status 503\\)"),
        (410, "", "", "the hub answers 410 Gone"),
    ],
)
def test_refusals_say_what_to_do(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch, status: int, code: str, token: str, said: str
) -> None:
    """In one line."""
    monkeypatch.setenv("HF_TOKEN", token)
    server.refusal = (status, code)
    with pytest.raises(FetchError, match=said) as caught:
        repository_files(HubName("org/x"))
    assert "\n" not in caught.value.message


def test_a_gated_file_is_refused_as_such(server: FakeHub, tmp_path: Path) -> None:
    """The hub lists the files of a gated model to everybody, and gives them to those who have accepted its licence."""
    file = repository_files(HubName("org/x"))[NAME]
    server.refusal = (401, "GatedRepo")
    with pytest.raises(FetchError, match="org/x is gated"):
        download(file, tmp_path / "m.gguf", lambda _: None)


def test_no_network_and_what_is_no_hub(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.found = [{"no": "id"}]
    with pytest.raises(FetchError, match="Is HF_ENDPOINT right"):
        search_models("x", 3)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE is set"):
        search_models("x", 3)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(FetchError, match="Check the network and HTTPS_PROXY"):
        search_models("x", 3)


def test_a_disk_that_is_too_small_is_told_before_anything_comes(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier fetch left counts as there."""
    files = {tmp_path / "new" / NAME: repository_files(HubName("org/x"))[NAME]}
    spare = hub_client._SPARE_BYTES
    monkeypatch.setattr(hub_client.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=spare + len(DATA) - 1))
    with pytest.raises(FetchError, match=r"100.0 KiB are to be fetched .* tokenmill rm"):
        require_room(tmp_path / "new", files)
    assert not server.downloads() and not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    part = hub_client._part(*next(iter(files.items())))
    part.write_bytes(b"x")
    require_room(tmp_path / "new", files)


def test_a_disk_that_fills_up_meanwhile(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FetchError, match=r"is full. What has come is kept"):
            fetch(tmp_path / "m.gguf")
    server.calls.clear()
    fetch(tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == DATA and not server.downloads(), "it was whole by then"


def test_a_file_of_a_web_server(server: FakeHub, tmp_path: Path) -> None:
    """Without a digest it is told from others by what the server says of its version."""
    name = UrlName(f"{server.url}/storage/{NAME}", "key=secret")
    file = hub_client.file_at(name)
    assert (file.size, file.sha256) == (len(DATA), "") and file.url.endswith("?key=secret")
    server.files[NAME] = DATA + b"x"
    assert hub_client.file_at(name).version != file.version
    with pytest.raises(FetchError, match=r"no GGUF file. Is it a page for people\?"):
        download(hub_client.file_at(name), tmp_path / "m.gguf", lambda _: None)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FetchError, match="the server answers 404") as caught:
        hub_client.file_at(UrlName(f"http://localhost:{server.url.rpartition(':')[2]}/storage/none.gguf", "key=secret"))
    assert "secret" not in caught.value.message


def test_a_file_of_unknown_size_is_refused(server: FakeHub) -> None:
    """Where the connection's end is the file's, one that broke off looks whole."""
    server.tells_size = False
    with pytest.raises(FetchError, match="does not tell its size"):
        hub_client.file_at(UrlName(f"{server.url}/storage/{NAME}"))


@pytest.mark.parametrize("token", ["hf_secret\nsecond line", "hf_sécret", "hf_secret\x1b"])
def test_a_token_that_no_header_can_hold_is_refused_untold(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(FetchError, match="it must be one line of ASCII") as caught:
        repository_files(HubName("org/x"))
    assert "cret" not in caught.value.message


def test_files_that_a_terminal_would_obey_are_none(server: FakeHub) -> None:
    server.files.update({"\x1b]0;owned\x07-Q8_0.gguf": DATA, "a\nb.json": b"{}", "nul\0.json": b"{}"})
    assert set(repository_files(HubName("org/x"))) == {NAME}


@pytest.mark.parametrize("commit", ["../../../up", "a/b", ""])
def test_a_version_becomes_no_path(server: FakeHub, monkeypatch: pytest.MonkeyPatch, commit: str) -> None:
    monkeypatch.setattr("fake_hub._about", lambda name, data: {"rfilename": name, "size": len(data)})
    server.commit = commit
    with pytest.raises(FetchError, match="does not answer as the Hugging Face hub does"):
        repository_files(HubName("org/x"))


def test_an_answer_that_nests_without_end_is_none_of_the_hub(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", lambda _: "[" * 100_000)
    with pytest.raises(FetchError, match="does not answer as the Hugging Face hub does"):
        search_models("a", 1)


def test_a_redirect_to_itself_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error = urllib.error.HTTPError("https://h/x", 302, "would loop\nThe last was:\nFound", Message(), None)
    told = str(hub_client._refusal("https://h/x", error, False))
    assert told == "https://h/x cannot be fetched: the server answers 302 would loop."


def test_search(server: FakeHub) -> None:
    server.found = [
        {"id": "a/M-GGUF", "downloads": 7, "gated": "auto", "gguf": {"total": 10, "architecture": "qwen3"}},
        {"id": "b/M-GGUF", "gated": False},
    ]
    assert search_models("qwen 4b", 5) == [
        FoundModel("a/M-GGUF", 7, 10, "qwen3", True),
        FoundModel("b/M-GGUF", 0, 0, "", False),
    ]
    asked = server.calls[-1][0]
    assert asked.startswith("/api/models?search=qwen+4b&filter=gguf&sort=downloads") and "limit=5" in asked
