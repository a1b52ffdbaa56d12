"""The terminal conversation over a server that misbehaves, and how lines become messages."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from tokenmill.cli.chat import Said, ServerPartner, _ask, _converse
from tokenmill.core.errors import ConfigError, ContextTooLong, Unavailable


class Handler(http.server.BaseHTTPRequestHandler):
    """Lists its models; the first message decides how it answers."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        body = b"<html>" if self.path.startswith("/html") else b'{"data": [{"id": "m[/x]"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        event = b'data: {"choices": [{"delta": {"content": "part"}}]}\n\n'
        if asked == "refuse":
            body = json.dumps({"error": {"message": "no [/such] thing"}}).encode()
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            if asked != "break":
                self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        self.close_connection = True


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What the user will type; then the input ends."""
    left = iter(lines)

    def give(prompt: str = "") -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", give)


def test_a_connection_that_breaks_off_is_said_and_the_conversation_goes_on(url, monkeypatch, capsys):
    typed(monkeypatch, "break", "whole")
    assert _converse(ServerPartner(url, None, {}), None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "part" and lines[2].startswith("The connection broke off") and lines[3] == "part"


def test_brackets_in_names_and_errors_are_shown_as_they_are(url, monkeypatch, capsys):
    typed(monkeypatch, "refuse")
    assert _converse(ServerPartner(url, None, {}), None) == 0
    said = capsys.readouterr().out
    assert "m[/x]" in said and "no [/such] thing" in said


def test_a_full_context_names_the_way_out(monkeypatch, capsys):
    class Full:
        name = "full"

        def answer(self, messages):
            raise ContextTooLong("Too long.")
            yield

    typed(monkeypatch, "hello")
    assert _converse(Full(), None) == 0
    assert "/reset" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:port", "ftp://there", "http://", "http://[::1"])
def test_a_wrong_url_is_named(wrong):
    with pytest.raises(ConfigError, match="--url"):
        ServerPartner(wrong, None, {})


def test_a_server_of_something_else_is_refused(url):
    with pytest.raises(ConfigError, match="models"):
        ServerPartner(f"{url}/html", None, {})
    with pytest.raises(Unavailable, match="no answer"):
        ServerPartner("http://127.0.0.1:1", None, {})


def test_a_backslash_continues_the_message(monkeypatch):
    typed(monkeypatch, "one \\", "two\\", "three", "four")
    assert _ask() == "one \ntwo\nthree"
    assert _ask() == "four"
    assert _ask() is None


def test_why_an_answer_was_ended_is_shown(monkeypatch, capsys):
    class Looping:
        name = "m"

        def answer(self, messages):
            yield Said("so so so", 3)
            yield Said("", 0, warning="It repeats [itself].")

    typed(monkeypatch, "hello")
    assert _converse(Looping(), None) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["so so so", "It repeats [itself]."]


def test_reasoning_is_shown_and_no_part_of_what_is_kept(monkeypatch, capsys):
    heard = []

    class Thinker:
        name = "m"

        def answer(self, messages):
            heard.append([message["content"] for message in messages])
            yield Said("", 1, "Hm. ")
            yield Said("", 1, "So.")
            yield Said("Yes", 1)
            yield Said(".", 1)

    typed(monkeypatch, "one", "two")
    assert _converse(Thinker(), None) == 0
    assert "Hm. So.\n\nYes.\n" in capsys.readouterr().out
    assert heard == [["one"], ["one", "Yes.", "two"]]
