"""The terminal conversation: over a server that misbehaves, how lines become messages, and what its commands do."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from rich.console import Console

from commands import run_command
from tokenmill.cli.chat import Conversation, ask, show
from tokenmill.cli.partners import LocalPartner, Message, Said, ServerPartner
from tokenmill.core.errors import ConfigError, ContextTooLong, Unavailable
from tokenmill.text.choice import Piece

USAGE = (
    b'data: {"choices": [], "usage": {"completion_tokens": 9}, "metrics": {"speculative_decoding": '
    b'{"num_spec_steps": 4, "num_draft_tokens": 10, "num_accepted_draft_tokens": 6}}}\n\n'
)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


class Handler(http.server.BaseHTTPRequestHandler):
    """Lists its models; the last message decides how it answers. /see reads images, and / says nothing of them."""

    protocol_version = "HTTP/1.1"
    heard: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []

    def log_message(self, *args: object) -> None:
        pass

    def _give(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path.endswith("/props"):
            sees = {"/see/props": True, "/blind/props": False}.get(self.path)
            self._give(
                *((404, b"{}") if sees is None else (200, json.dumps({"modalities": {"vision": sees}}).encode()))
            )
        elif self.path.startswith("/html"):
            self._give(200, b"<html>")
        elif self.path.startswith("/small"):
            self._give(200, b'{"data": [{"id": "m", "meta": {"n_params": 135000000}}, {"id": "n", "meta": []}]}')
        elif self.path.startswith("/none"):
            self._give(200, b'{"data": []}')
        else:
            self._give(200, b'{"data": [{"id": "m[/x]"}, {"id": "other"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.heard.append(body)
        self.keys.append(self.headers["Authorization"])
        asked = body["messages"][-1]["content"]
        event = b'data: {"choices": [{"delta": {"content": "part"}}]}\n\n'
        if asked in ("refuse", "locked", "long"):
            status, code = {"refuse": (400, None), "locked": (401, None), "long": (400, "context_length_exceeded")}[
                asked
            ]
            self._give(status, json.dumps({"error": {"message": "no [/such] thing", "code": code}}).encode())
        else:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            if asked == "drafted" and "stream_options" in body:
                event += USAGE
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


def talk(monkeypatch: pytest.MonkeyPatch, url: str, *lines: str) -> Conversation:
    typed(monkeypatch, *lines)
    conversation = Conversation(ServerPartner(url, None, {}))
    assert conversation.run() == 0
    return conversation


class Echo:
    """Answers with what it heard."""

    name = "echo"
    num_parameters = 0
    reads_images = False

    def __init__(self) -> None:
        self.heard: list[list[Message]] = []

    def answer(self, messages: list[Message]) -> Iterator[Said]:
        self.heard.append(list(messages))
        yield Said(f"re: {messages[-1]['content']}", 1, finish="stop")


def echoed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> tuple[Echo, Conversation]:
    typed(monkeypatch, *lines)
    partner = Echo()
    conversation = Conversation(partner)
    assert conversation.run() == 0
    return partner, conversation


# ---- servers ----


def test_a_connection_that_breaks_off_is_said_and_the_conversation_goes_on(url, monkeypatch, capsys):
    talk(monkeypatch, url, "break", "whole")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "part" and lines[2].startswith("The connection broke off") and lines[3] == "part"


def test_a_small_model_of_a_server_is_called_small_once(url, monkeypatch):
    """Where the server tells its parameters, and on a terminal; not among what is answered."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    talk(monkeypatch, f"{url}/small/v1", "whole", "whole")
    assert terminal.getvalue().count("this model is small (135.0M parameters)") == 1
    assert ServerPartner(f"{url}/small/v1", None, {}, "n").num_parameters == 0


def test_brackets_in_names_and_errors_are_shown_as_they_are(url, monkeypatch, capsys):
    talk(monkeypatch, url, "refuse")
    said = capsys.readouterr().out
    assert "m[/x]" in said and "no [/such] thing" in said


def test_stats_are_told_on_standard_error(url: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Tokens as the server has counted them, where one piece is of several; drafts only where some were verified."""
    told = []
    for line, stats in (("drafted", True), ("whole", True), ("drafted", False)):
        typed(monkeypatch, line)
        assert Conversation(ServerPartner(url, None, {}, asks_usage=stats), stats=stats).run() == 0
        told.append(capsys.readouterr().err)
    assert told[0].startswith("9 tokens, ") and told[0].endswith("; 6 of 10 drafts accepted, 1.5 a step\n")
    assert told[1].startswith("1 tokens, ") and "drafts" not in told[1] and not told[2]


def test_a_model_loaded_here_tells_its_drafts() -> None:
    class Model:
        ready = SimpleNamespace(model="m")
        text = SimpleNamespace(info=SimpleNamespace(num_parameters=0))

        def default_sampling(self, **how: Any) -> None:
            pass

        def stream(self, messages: list[Message], sampling: None) -> Iterator[Piece]:
            yield Piece("a", tokens=(1,))
            yield Piece("b", tokens=(2, 3, 4), draft_steps=((3, 2),), finish_reason="stop")

    partner = LocalPartner(Model(), {"max_tokens": 9})  # type: ignore[arg-type]
    assert [(each.num_tokens, each.drafted) for each in partner.answer([])] == [(1, (0, 0, 0)), (3, (1, 3, 2))]


def test_a_full_context_names_the_way_out(url, monkeypatch, capsys):
    talk(monkeypatch, url, "long")
    assert "/clear" in capsys.readouterr().out
    with pytest.raises(ContextTooLong):
        list(ServerPartner(url, None, {}).answer([{"role": "user", "content": "long"}]))


def test_a_server_that_asks_for_a_key_says_how_to_give_it(url, monkeypatch, capsys):
    talk(monkeypatch, url, "locked")
    said = capsys.readouterr().out.replace("\n", " ")
    assert "--api-key" in said and "OPENAI_API_KEY" in said


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:port", "ftp://there", "http://", "http://[::1"])
def test_a_wrong_url_is_named(wrong):
    with pytest.raises(ConfigError, match="--url"):
        ServerPartner(wrong, None, {})


def test_a_server_of_something_else_is_refused(url):
    with pytest.raises(ConfigError, match="models"):
        ServerPartner(f"{url}/html", None, {})
    with pytest.raises(ConfigError, match="no model"):
        ServerPartner(f"{url}/none", None, {})
    with pytest.raises(Unavailable, match="no answer"):
        ServerPartner("http://127.0.0.1:1", None, {})


def test_a_server_that_has_gone_is_started_again(url):
    partner = ServerPartner("http://127.0.0.1:1", None, {}, "other", lambda: url)
    assert "".join(said.text for said in partner.answer([{"role": "user", "content": "hi"}])) == "part"


@pytest.mark.parametrize("how", [("URL",), ("--url", "URL"), ("URL", "--model", "other"), ("URL", "--url", "URL")])
def test_an_address_is_a_server_and_the_key_may_be_in_the_environment(how, url, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    monkeypatch.delenv("TOKENMILL_API_KEY", raising=False)
    typed(monkeypatch, "hello")
    Handler.heard.clear()
    Handler.keys.clear()
    ended = run_command("chat", *(url if word == "URL" else word for word in how), "-n", "7")
    assert ended.returncode == 0, ended.stderr
    (body,) = Handler.heard
    named = "--model" in how
    assert body["model"] == ("other" if named else "m[/x]") and body["max_tokens"] == 7 and body["stream"] is True
    assert Handler.keys == ["Bearer sk-1"]
    assert ("the first of 2 models" in ended.stdout) == (not named)


@pytest.mark.parametrize(
    ("model", "says"),
    [("none", "has no model 'none'; it has: m[/x], other."), ("othr", "has no model 'othr'; did you mean other?")],
)
def test_a_model_that_the_server_lacks_is_refused_before_the_first_message(url, monkeypatch, model, says):
    typed(monkeypatch, "hello")
    ended = run_command("chat", "--url", url, "--model", model)
    assert ended.returncode == 2 and says in ended.stderr and ended.stdout == ""


def test_a_servers_model_may_be_named_with_ollamas_tag(url):
    assert ServerPartner(url, None, {}, "other:latest").name == "other:latest"


@pytest.mark.parametrize(
    ("words", "says"),
    [(("http://127.0.0.1:1", "http://127.0.0.1:2"), "unknown argument"), (("http://127.0.0.1:1",), "no answer")],
)
def test_an_address_that_is_wrong_is_one_line(words, says):
    ended = run_command("chat", *words)
    assert ended.returncode == 2 and says in ended.stderr and ended.stderr.count("\n") == 1


def test_an_address_of_a_model_is_no_server():
    ended = run_command("chat", "https://127.0.0.1:1/model.gguf")
    assert ended.returncode == 2 and "pass its path" in ended.stderr


# ---- lines ----


def test_a_backslash_or_quotes_continue_the_message(monkeypatch):
    typed(
        monkeypatch,
        "one \\",
        "two\\",
        "three",
        "four",
        '"""five',
        "  six",
        "",
        'seven"""',
        '"""',
        "8",
        '"""',
        '"""9"""',
    )
    assert [ask() for _ in range(6)] == ["one \ntwo\nthree", "four", "five\n  six\n\nseven", "8", "9", None]


def test_why_an_answer_was_ended_is_shown(monkeypatch, capsys):
    class Looping:
        name = "m"
        num_parameters = 0
        reads_images = None

        def answer(self, messages):
            yield Said("so so so", 3)
            yield Said("", 0, warning="It repeats [itself].")

    typed(monkeypatch, "hello")
    assert Conversation(Looping()).run() == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["so so so", "It repeats [itself]."]


def test_reasoning_is_shown_and_no_part_of_what_is_kept(monkeypatch, capsys):
    heard = []

    class Thinker:
        name = "m"
        num_parameters = 0
        reads_images = None

        def answer(self, messages):
            heard.append([message["content"] for message in messages])
            yield Said("", 1, "Hm. ")
            yield Said("", 1, "So.")
            yield Said("Yes", 1)
            yield Said(".", 1)

    typed(monkeypatch, "one", "two")
    assert Conversation(Thinker()).run() == 0
    assert "Hm. So.\n\nYes.\n" in capsys.readouterr().out
    assert heard == [["one"], ["one", "Yes.", "two"]]


def test_what_has_come_when_an_answer_is_stopped_is_kept_and_nothing_leaves_no_trace(monkeypatch, capsys):
    class Slow:
        name = "m"
        num_parameters = 0
        reads_images = None

        def answer(self, messages):
            if messages[-1]["content"] == "one":
                yield Said("so far", 1)
            raise KeyboardInterrupt

    typed(monkeypatch, "one", "two")
    conversation = Conversation(Slow())
    assert conversation.run() == 0
    assert "so far [stopped]" in capsys.readouterr().out
    assert [each["content"] for each in conversation.turns] == ["one", "so far"]


# ---- commands ----


def test_commands_change_what_the_model_hears(monkeypatch):
    lines = ("one", "two", "/undo", "three", "/regen", "/system Be brief.", "four", "/reset", "five", "/bye", "never")
    partner, _ = echoed(monkeypatch, *lines)
    contents = [[each["content"] for each in messages] for messages in partner.heard]
    assert contents[2] == contents[3] == ["one", "re: one", "three"]
    assert contents[4:] == [["Be brief.", "four"], ["Be brief.", "five"]]


def test_what_ollama_sets_in_a_conversation_is_set_or_said_to_be_a_flag(monkeypatch, capsys):
    partner, _ = echoed(monkeypatch, '/set system "Be brief."', "one", "/set parameter temperature 0.5", "/show info")
    assert [each["content"] for each in partner.heard[0]] == ["Be brief.", "one"]
    said = capsys.readouterr().out
    assert "--temperature 0.5" in said and "tokenmill show echo" in said


def test_a_wrong_command_is_named_and_a_path_is_a_message(monkeypatch, capsys):
    partner, _ = echoed(monkeypatch, "/sytem x", "/zzz", "/undo", "/retry", "/file", "/etc/hosts is what?")
    said = capsys.readouterr().out
    assert "did you mean /system?" in said and "no command /zzz; /help" in said
    assert "nothing to take back" in said and "no answer yet" in said and "Name a file." in said
    assert len(partner.heard) == 1


def test_files_go_into_the_next_message_alone(monkeypatch, capsys, tmp_path: Path):
    (tmp_path / "a b.py").write_text("print('```')\n")
    (tmp_path / "bin").write_bytes(b"\xff\xfe")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate((1 << 20) + 1)
    escaped = str(tmp_path / "a b.py").replace(" ", "\\ ")
    lines = (
        f"/file {escaped}",
        f"/file {tmp_path}/bin",
        f"/file {tmp_path}/huge",
        f"/file {tmp_path}/none",
        "Why?",
        "So?",
    )
    partner, _ = echoed(monkeypatch, *lines)
    assert partner.heard[0][-1]["content"] == "a b.py:\n````\nprint('```')\n````\n\nWhy?"
    assert partner.heard[1][-1]["content"] == "So?"
    said = " ".join(capsys.readouterr().out.split())
    assert "not a text file" in said and "larger than 1.0 MiB" in said and "cannot be read (No such file" in said


def test_images_go_to_servers_that_read_them(url, monkeypatch, capsys, tmp_path: Path):
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "a.txt").write_text("no image")
    Handler.heard.clear()
    talk(
        monkeypatch, f"{url}/see/v1", f"/image {tmp_path}/a.txt", f"/image {tmp_path}/a.png", "What is it?", "And now?"
    )
    assert "not an image" in capsys.readouterr().out
    first, second = (body["messages"] for body in Handler.heard)
    image, text = first[0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgo") and text["text"] == "What is it?"
    assert second[2]["content"] == "And now?"
    talk(monkeypatch, f"{url}/blind/v1", f"/image {tmp_path}/a.png")
    assert "reads no images" in capsys.readouterr().out
    talk(monkeypatch, url, f"/image {tmp_path}/a.png")  # a server that does not tell is asked
    assert "goes with the next message" in capsys.readouterr().out
    echoed(monkeypatch, f"/image {tmp_path}/a.png")
    assert "echo reads no images" in capsys.readouterr().out


def test_a_conversation_is_saved_and_goes_on(monkeypatch, capsys, tmp_path: Path):
    saved, text = tmp_path / "c.json", tmp_path / "c.md"
    text.write_text("precious")
    saves = (f"/save {path}" for path in (saved, saved, text, tmp_path / "d.md", tmp_path / "no" / "such"))
    echoed(monkeypatch, "/system Be brief.", "one", *saves)
    said = " ".join(capsys.readouterr().out.split())
    assert "already" in said and text.read_text() == "precious" and "cannot be written" in said
    assert json.loads(saved.read_text())["model"] == "echo"
    assert (tmp_path / "d.md").read_text() == "## system\n\nBe brief.\n\n## user\n\none\n\n## assistant\n\nre: one\n"
    partner, _ = echoed(monkeypatch, f"/load {text}", f"/load {saved}", "two")
    assert "not a conversation" in capsys.readouterr().out
    assert [each["content"] for each in partner.heard[0]] == ["Be brief.", "one", "re: one", "two"]
    saved.write_text(json.dumps({"messages": [{"role": "user", "content": "alone"}]}))
    _, conversation = echoed(monkeypatch, f"/load {saved}")
    assert not conversation.turns and "take turns" in capsys.readouterr().out


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_obeys_nothing_that_a_model_writes(is_terminal: bool) -> None:
    """Others may tell it what to write. A file gets it as it is; so does the conversation."""

    text = "a\x1b]52;c;eA==\x07\tb"

    class Writes:
        num_parameters = 0

        def answer(self, messages: list[Message]) -> Iterator[Said]:
            yield Said(text, num_tokens=1)

    console = Console(file=io.StringIO(), force_terminal=is_terminal, highlight=False, soft_wrap=True)
    assert show(Writes(), [], console, figures=False) == text  # type: ignore[arg-type]
    shown = "a\\x1b]52;c;eA==\\x07\tb" if is_terminal else text
    assert console.file.getvalue() == f"{shown}\n"  # type: ignore[attr-defined]
