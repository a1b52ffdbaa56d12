"""Flags about HTTP come to what is written for them: keys and names add up, and what contradicts itself is one line."""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

import pytest

from tokenmill.cli import main as cli
from tokenmill.cli import serve_options
from tokenmill.cli.options import given_options
from tokenmill.cli.serve import ServeConfig
from tokenmill.cli.serve_options import HttpOptions
from tokenmill.cli.worker_options import ListenOptions
from tokenmill.core.errors import ConfigError
from tokenmill.server.config import ServerConfig
from tokenmill.server.listen import is_loopback, listening, make_tls


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in serve_options.KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def args(*argv: str) -> argparse.Namespace:
    return cli._parser(["serve", *argv]).parse_args(["serve", *argv])


def http(*argv: str) -> HttpOptions:
    return given_options(HttpOptions, args(*argv))


def config(*argv: str) -> ServerConfig:
    return ServeConfig.of(args(*argv)).named("own")


def test_keys_add_up_from_flags_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nthe-third\n\n  the-fourth  \nthe-first\n")
    monkeypatch.setenv("VLLM_API_KEY", "the-fifth")
    monkeypatch.setenv("LLAMA_API_KEY", "")
    given = ("--api-key", "the-first", "--api-key=the-second", "--api-key-file", str(file))
    assert config(*given).api_keys == ("the-first", "the-second", "the-third", "the-fourth", "the-fifth")
    assert "VLLM_API_KEY" not in os.environ, "processes that the server starts would inherit it"
    assert config().api_keys == ()


@pytest.mark.parametrize("text", ["", "# nothing\n", "clé\n"])
def test_a_file_without_a_usable_key_does_not_leave_the_server_open(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError):
        config("--api-key-file", str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="cannot be read"):
        config("--api-key-file", str(tmp_path / "missing"))


@pytest.mark.parametrize("place", ["flag", "file", "environment"])
def test_a_key_that_can_be_guessed_is_refused_under_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Wherever it comes from; the message does not show it."""

    def given(key: str) -> ServerConfig:
        (tmp_path / "keys").write_text(f"a-key-that-is-long\n{key}\n")
        if place == "environment":
            monkeypatch.setenv("TOKENMILL_API_KEY", key)
            return config()
        return config("--api-key-file", str(tmp_path / "keys")) if place == "file" else config("--api-key", key)

    with pytest.raises(ConfigError, match=r"fewer than 8 characters.*tokenmill keys create") as caught:
        given("sesame1")
    assert "sesame1" not in str(caught.value)
    assert "sesame12" in given("sesame12").api_keys


def test_names_add_up_and_do_not_swallow_the_model() -> None:
    def names(*argv: str) -> tuple[str, ...]:
        return config(*argv).model_names

    assert names() == ("own",)
    assert names("smollm2", "--served-model-name", "a", "b", "--served-model-name", "c", "a") == ("a", "b", "c")
    assert names("--served-model-name", "smollm2") == ("smollm2",)
    for model in ("minilm", "."):
        with pytest.raises(ConfigError, match="before --served-model-name"):
            names("--served-model-name", "a", model)


def test_host_is_looked_at_where_only_this_machine_connects() -> None:
    def hosts(*argv: str) -> tuple[str, ...] | None:
        return config(*argv).allowed_hosts

    assert hosts() == hosts("--host", "localhost") == hosts("--host", "::1") == ()
    assert hosts("--host", "0.0.0.0") is hosts("--host", "") is None
    assert hosts("--uds", "/tmp/x") is hosts("--ssl-certfile", "c.pem") is None
    assert hosts("--allowed-hosts", "a", "*.b", "--allowed-hosts", "c") == ("a", "*.b", "c")
    assert hosts("--host", "0.0.0.0", "--allowed-hosts", "a") == ("a",)
    assert is_loopback("127.5.5.5") and not is_loopback("192.0.2.1") and not is_loopback("no such host")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--ssl-keyfile", "k"], "--ssl-certfile"),
        (["--ssl-cert-reqs", "2"], "--ssl-certfile"),
        (["--ssl-certfile", "c", "--ssl-cert-reqs", "2"], "--ssl-ca-certs"),
        (["--ssl-certfile", "/no/such/file"], "do not serve"),
        (["--ssl-certfile", __file__], "do not serve"),
    ],
)
def test_tls_that_cannot_be_is_one_line(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        http(*argv).tls()
    assert "\n" not in caught.value.message
    assert http().tls() is None


def test_a_certificate_whose_key_is_locked_is_refused_without_asking(tmp_path: Path) -> None:
    locked = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n"
    (tmp_path / "key").write_text(locked)
    with pytest.raises(ConfigError):
        make_tls(str(tmp_path / "key"))


def test_what_to_connect_to_is_shown() -> None:
    assert http().shown_address("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert http("--ssl-certfile", "c").shown_address("::", 443, "/llm") == "https://[::]:443/llm"
    assert "curl --unix-socket /run/t.sock http://localhost/v1/models" in http("--uds", "/run/t.sock").shown_address(
        "/run/t.sock", 0
    )


def test_a_unix_socket_is_private_replaces_what_is_dead_and_goes_with_its_server(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(path)
    dead.close()
    with listening("", 0, path):
        assert Path(path).stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="another server"), listening("", 0, path):
            pass
    assert not Path(path).exists()
    Path(path).write_text("precious")
    with pytest.raises(ConfigError, match="no socket"), listening("", 0, path):
        pass
    assert Path(path).read_text() == "precious"
    with pytest.raises(ConfigError, match="Cannot listen"), listening("", 0, "/" + "long/" * 50):
        pass


def test_of_two_that_are_bound_to_one_port_the_second_to_listen_is_told() -> None:
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        with listening("127.0.0.1", first.getsockname()[1]), pytest.raises(OSError, match="in use"):
            first.listen()
        first.listen()
        with pytest.raises(ConfigError, match="Cannot listen"), listening("127.0.0.1", first.getsockname()[1]):
            pass


def test_a_log_length_is_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("-1", "many", "²"):
        with pytest.raises(SystemExit):
            args(f"--max-log-len={text}")
    assert "at least 0" in capsys.readouterr().err


def test_how_many_engines_serve_where() -> None:
    """One unless more are asked for; those of --workers are beside those of the two other pools."""

    def pools(*argv: str) -> tuple[str, ...]:
        return given_options(ListenOptions, args(*argv)).pools

    assert pools() == ("mixed",)
    assert pools("--workers", "2") == ("mixed", "mixed")
    assert pools("--prefill-workers", "1", "--decode-workers", "2") == ("prefill", "decode", "decode")
    assert pools("--prefill-workers", "1", "--decode-workers", "1", "--workers", "1") == ("mixed", "prefill", "decode")
    assert pools("--no-engine", "--listen-workers", "127.0.0.1:0") == ()
    for argv, what in (
        (("--prefill-workers", "1"), "go together"),
        (("--workers", "60", "--prefill-workers", "4", "--decode-workers", "1"), "at most 64 workers"),
        (("--workers", "0"), "at least 1"),
        (("--workers", "2", "--no-engine", "--listen-workers", "127.0.0.1:0"), "starts none"),
    ):
        with pytest.raises(ConfigError, match=what):
            pools(*argv)
