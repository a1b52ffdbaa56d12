"""Flags of KV tiers: what each starts, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli.main import main
from tokenmill.core.errors import ConfigError
from tokenmill.core.tiers import DISK, HOST, PEER, REMOTE
from tokenmill.kv.store.child import own_store
from tokenmill.kv.store.options import SMALL_HOST_BYTES, TierOptions
from tokenmill.node.options import EngineOptions


@pytest.mark.parametrize(
    ("given", "tiers"),
    [
        ({}, ()),
        ({"kv_host": 1 << 30}, (HOST,)),
        ({"kv_disk": "/var/kv:5GB"}, (HOST, DISK)),
        ({"kv_remote": "redis://127.0.0.1:6379", "kv_key_file": "key"}, (HOST, REMOTE)),
        ({"kv_peers": "10.0.0.1:7100, 10.0.0.2:7100", "kv_key_file": "key"}, (HOST, PEER)),
        ({"kv_peer_address": "127.0.0.1:0", "kv_key_file": "key"}, (HOST,)),
    ],
)
def test_each_flag_starts_its_tier_with_what_it_needs(given: dict[str, Any], tiers: tuple[str, ...]) -> None:
    """Host memory comes along: whatever a tier has passes through it."""
    options = TierOptions(**given)
    assert options.tiers == tiers
    assert options.host_bytes == given.get("kv_host", SMALL_HOST_BYTES)


def test_what_is_given_is_taken_apart() -> None:
    options = TierOptions(kv_disk="~/a:b:5GiB", kv_peers="a:1, b:2,", kv_key_file="k", kv_quota=(("", 10), ("acme", 3)))
    assert options.disk == (Path("~/a:b").expanduser().absolute(), 5 << 30)
    assert options.peers == ("a:1", "b:2")
    assert options.quotas == {"": 10, "acme": 3}
    secret = TierOptions(kv_remote="redis://me:hidden@host:6379/0", kv_key_file="k")
    assert "hidden" not in secret.describe() and "redis://host:6379/0" in secret.describe()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_host": 1000}, "--kv-host must be"),
        ({"kv_disk": "/var/kv"}, "FOLDER:SIZE"),
        ({"kv_disk": "/var/kv:1KB"}, "--kv-disk must be"),
        ({"kv_disk": "/var/kv:5XB"}, "must be a size"),
        ({"kv_remote": "somewhere", "kv_key_file": "k"}, "must be a URL"),
        ({"kv_remote": "redis://127.0.0.1"}, "needs --kv-key-file"),
        ({"kv_peers": " , ", "kv_key_file": "k"}, "no address"),
        ({"kv_disk_write_rate": 10}, "needs --kv-disk"),
    ],
)
def test_what_cannot_be_is_refused_with_the_flag_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TierOptions(**given)


@pytest.mark.parametrize(
    ("tiers", "engine", "words"),
    [
        (TierOptions(), EngineOptions(kv_write="selective"), "--kv-write needs KV tiers"),
        (TierOptions(kv_tier_policy="lru"), EngineOptions(), "need a tier"),
        (TierOptions(kv_disk="kv:1GB"), EngineOptions(kv_save="kv"), "both name the folder of the disk tier"),
        (TierOptions(kv_host=1 << 30), EngineOptions(kv_save=""), "no folder"),
    ],
)
def test_what_has_no_effect_is_refused(tiers: TierOptions, engine: EngineOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words), own_store(tiers, engine):
        pass


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--kv-remote", "redis://127.0.0.1:1", "--kv-key-file", "{}/none.key"), "none.key cannot be read"),
        (("--kv-disk", "{}/kv:100MB", "--kv-disk-key", "{}/short.key"), "it needs 32"),
        (("--kv-remote", "gopher://x", "--kv-key-file", "{}/kv.key"), "--kv-remote takes"),
        (("--kv-peers", "nowhere", "--kv-key-file", "{}/kv.key"), "--kv-peers takes HOST:PORT"),
    ],
)
def test_a_shared_store_does_not_wait_for_a_worker_to_say_what_is_wrong(
    args: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, num_bytes in (("short.key", 8), ("kv.key", 40)):
        (tmp_path / name).write_bytes(b"k" * num_bytes)
        (tmp_path / name).chmod(0o600)
    socket = tmp_path / "socket"
    assert main(["kv", "serve", "--socket", str(socket), *(word.format(tmp_path) for word in args)]) == 2
    assert words in capsys.readouterr().err
    assert not socket.exists() and not (tmp_path / "kv").exists()


@pytest.mark.parametrize("command", [("ls",), ("rm",), ("export", "-o", "{}/archive")])
def test_documents_are_not_asked_of_another_store_than_was_named(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "document.txt").write_text("A text.")
    words = [word.format(tmp_path) for word in command]
    assert main(["kv", *words, "--kv-store", f"{tmp_path}/socket", f"{tmp_path}/document.txt"]) == 2
    assert "give its --url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "words"), [("--limit", "0", "at least 1"), ("--prefix", "zz", "hexadecimal")]
)
def test_no_empty_list_for_what_cannot_be(
    flag: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", "ls", "--url", "http://127.0.0.1:1", flag, value]) == 2
    assert words in capsys.readouterr().err
