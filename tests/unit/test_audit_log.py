"""The audit log: what is written comes out as a chain, and nothing can be done to it that a check does not find."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from tokenmill.cli.main import main
from tokenmill.control.audit import chain as segments
from tokenmill.control.audit import log as log_module
from tokenmill.control.audit.chain import START, Tip, files_of, head_of, line_after, tip_of
from tokenmill.control.audit.log import AuditLog, Syslog
from tokenmill.control.audit.options import AuditOptions
from tokenmill.control.audit.verify import Finding, verify
from tokenmill.control.signing import Signer, load_signer, load_verifier, make_key
from tokenmill.core.errors import ConfigError
from tokenmill.core.masking import Mask

NUM = 10_000


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "audit.pem"
    make_key(path)
    return path


@pytest.fixture(scope="module")
def signer(key: Path) -> Signer:
    return load_signer(str(key), "KEY")


def write(path: Path, signer: Signer, *, num: int = 1, first: int = 0, **how: Any) -> None:
    log = AuditLog(str(path), signer, **how)
    log.open()
    for number in range(first, first + num):
        log.note({"action": "test", "object": f"thing {number}", "outcome": "done"})
    log.close()


def look(path: Path, signer: Signer, **how: Any) -> Finding:
    return verify(path, keys=[signer.public], **how)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, signer: Signer) -> Path:
    """10,000 entries and their heads; not to be changed."""
    path = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    write(path, signer, num=NUM)
    return path


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    for name in ("audit.jsonl", "audit.jsonl.heads"):
        (tmp_path / name).write_bytes((written.parent / name).read_bytes())
    return tmp_path / "audit.jsonl"


def test_what_was_written_is_found_whole(written: Path, signer: Signer) -> None:
    found = look(written, signer)
    assert (found.problems, found.notes) == ([], [])
    assert (found.num_entries, found.first, found.last.seq, found.signed) == (NUM, 1, NUM, NUM)
    assert found.num_heads >= NUM // log_module.HEAD_ENTRIES
    entries = [json.loads(line) for line in written.read_bytes().splitlines()]
    assert [entry["object"] for entry in entries] == [f"thing {number}" for number in range(NUM)]
    assert stat.S_IMODE(written.stat().st_mode) == 0o600


def edit(lines: list[bytes]) -> None:
    lines[4321] = lines[4321].replace(b"thing 4321", b"thing 1234")


def edit_last(lines: list[bytes]) -> None:
    lines[-1] = lines[-1].replace(b"done", b"none")


def delete(lines: list[bytes]) -> None:
    del lines[7000:7003]


def delete_first(lines: list[bytes]) -> None:
    del lines[0]


def reorder(lines: list[bytes]) -> None:
    lines[10], lines[11] = lines[11], lines[10]


def repeat(lines: list[bytes]) -> None:
    lines.insert(100, lines[99])


def insert(lines: list[bytes]) -> None:
    lines.insert(50, b'{"seq":51,"time":"2026-01-01T00:00:00.000Z","prev":"' + b"0" * 64 + b'","action":"x"}')


def truncate(lines: list[bytes]) -> None:
    del lines[NUM - 1 :]


def rubbish(lines: list[bytes]) -> None:
    lines[77] = b"[[[["


def _anew(lines: list[bytes], change: Callable[[dict[str, Any]], None]) -> None:
    """With a chain that fits by itself."""
    tip = START
    for index, line in enumerate(lines):
        entry = json.loads(line)
        change(entry)
        event = {name: value for name, value in entry.items() if name not in ("seq", "time", "prev")}
        lines[index] = line_after(tip, 0.0, event)
        tip = tip_of(tip.seq + 1, lines[index])


def rewrite(lines: list[bytes]) -> None:
    _anew(lines, lambda entry: entry.update(outcome="nothing happened"))


@pytest.mark.parametrize(
    "attack", [edit, edit_last, delete, delete_first, reorder, repeat, insert, truncate, rubbish, rewrite]
)
def test_every_change_is_found(copy: Path, signer: Signer, attack: Callable[[list[bytes]], None]) -> None:
    lines = copy.read_bytes().splitlines()
    attack(lines)
    copy.write_bytes(b"\n".join(lines) + b"\n")
    assert look(copy, signer).problems


def test_a_rewrite_with_heads_of_another_key_is_found(copy: Path, signer: Signer, tmp_path: Path) -> None:
    make_key(tmp_path / "own.pem")
    own = load_signer(str(tmp_path / "own.pem"), "KEY")
    lines = copy.read_bytes().splitlines()
    rewrite(lines)
    copy.write_bytes(b"\n".join(lines) + b"\n")
    head = head_of(tip_of(NUM, lines[-1]), 0.0, own)
    for claimed in (head, head | {"key": signer.key_id}):
        copy.with_name("audit.jsonl.heads").write_text(json.dumps(claimed) + "\n")
        assert not verify(copy, keys=[own.public]).problems or claimed["key"] != own.key_id
        assert any("is no head signed" in problem for problem in look(copy, signer).problems)


@pytest.mark.parametrize("attack", ["rewrite", "truncate"])
def test_without_its_heads_a_log_proves_nothing(copy: Path, signer: Signer, attack: str) -> None:
    """And a head that was kept elsewhere finds what was cut off together with its heads."""
    tip = look(copy, signer).last
    lines = copy.read_bytes().splitlines()
    heads = copy.with_name("audit.jsonl.heads")
    if attack == "rewrite":
        rewrite(lines)
        heads.unlink()
        assert look(copy, signer).problems == ["No signed head covers any of the log."]
    else:
        del lines[5000:]
        heads.write_bytes(b"".join(heads.read_bytes().splitlines(keepends=True)[:50]))
    copy.write_bytes(b"\n".join(lines) + b"\n")
    for known in (tip, Tip(-1, tip.hash)):
        assert verify(copy, keys=[], known=[known]).problems
        assert look(copy, signer, known=[known]).problems


def test_a_new_start_goes_on_with_the_chain(tmp_path: Path, signer: Signer) -> None:
    path = tmp_path / "a.jsonl"
    write(path, signer, num=3)
    write(path, signer, num=3, first=3)
    found = look(path, signer)
    assert (found.problems, found.last.seq, found.signed) == ([], 6, 6)


@pytest.mark.parametrize("length", [1, 8, 20, 60, 110, 200_000])
def test_half_a_line_is_taken_out_and_told_of(tmp_path: Path, signer: Signer, length: int) -> None:
    path = tmp_path / "a.jsonl"
    write(path, signer, num=3)
    tip = tip_of(3, path.read_bytes().splitlines()[-1])
    half = line_after(tip, 9e8, {"action": "test", "object": "x" * 300_000})[:length]
    with path.open("ab") as file:
        file.write(half)
    assert look(path, signer).problems == []
    write(path, signer, first=3)
    entries = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [entry["action"] for entry in entries] == ["test", "test", "test", "log.mend", "test"]
    assert entries[3]["bytes"] == len(half)
    assert look(path, signer).problems == []


def test_what_was_no_unfinished_write_is_left_as_it_is(tmp_path: Path, signer: Signer) -> None:
    """A line that a head covers, the entry of another place, and what is none: a start refuses, and so does a server
    that runs, each time that it looks."""
    path = tmp_path / "a.jsonl"
    write(path, signer, num=3)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    later = line_after(tip_of(4, lines[-1][:-1]), 9e8, {"action": "test"})
    other = line_after(Tip(3, "ab" * 32), 9e8, {"action": "test"})
    for data in (whole[:-1], whole[:-9], whole + lines[-1][:50], whole + later, whole + other, whole + bytes(50)):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="cannot be gone on with"):
            write(path, signer)
        assert path.read_bytes() == data
    path.write_bytes(whole)
    running = segments.Segments(path, 1 << 20)
    running.find_end()
    path.write_bytes(whole + b"garbage")
    for _ in range(2):
        with pytest.raises(segments.Damaged, match="7 bytes that are no beginning of entry 4"):
            running.find_end()
    running.close()


def test_half_a_head_is_taken_out(tmp_path: Path, signer: Signer) -> None:
    """The next one stands in a line of its own."""
    path = tmp_path / "a.jsonl"
    write(path, signer, num=3)
    heads = path.with_name("a.jsonl.heads")
    heads.write_bytes(heads.read_bytes() + b'{"seq":3,"ha')
    write(path, signer, first=3)
    found = look(path, signer)
    assert (found.problems, found.notes, found.num_heads) == ([], [], 2)


def test_a_log_that_ends_before_its_head_is_not_gone_on_with(tmp_path: Path, signer: Signer) -> None:
    path = tmp_path / "a.jsonl"
    write(path, signer, num=3)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(ConfigError, match="ends at entry 2, before its signed head at 3"):
        write(path, signer)
    path.unlink()
    with pytest.raises(ConfigError, match="ends at entry 0"):
        write(path, signer)


def test_large_logs_begin_new_files_and_stay_one_chain(tmp_path: Path, signer: Signer) -> None:
    path = tmp_path / "a.jsonl"
    for start in range(0, 400, 40):
        write(path, signer, num=40, first=start, max_bytes=4096)
    files = files_of(path)
    assert len(files) > 5 and files[-1] == path
    found = look(path, signer)
    assert found.problems == []
    entries = [json.loads(line) for file in files for line in file.read_bytes().splitlines()]
    told = [entry["object"] for entry in entries if entry["action"] == "log.rotate"]
    assert told == [file.name for file in files[:-1]]
    assert sum(entry["action"] == "test" for entry in entries) == 400
    begins_at = json.loads(files[1].read_bytes().splitlines()[0])["seq"]
    files[0].unlink()
    assert look(path, signer).problems
    assert look(path, signer, begins_at=begins_at).problems == []
    files[2].unlink()
    assert look(path, signer, begins_at=begins_at).problems


def test_two_writers_share_one_chain(tmp_path: Path, signer: Signer) -> None:
    """As two front ends do: with locks, each seeing where the other has left the end."""
    path = tmp_path / "a.jsonl"
    logs = [AuditLog(str(path), signer, max_bytes=20_000) for _ in range(2)]
    for log in logs:
        log.open()

    def note(log: AuditLog, name: str) -> None:
        for number in range(500):
            log.note({"action": name, "object": str(number), "outcome": "done"})

    threads = [threading.Thread(target=note, args=(log, f"by {index}")) for index, log in enumerate(logs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close()
    assert look(path, signer).problems == []
    entries = [json.loads(line) for file in files_of(path) for line in file.read_bytes().splitlines()]
    for index in range(2):
        mine = [entry["object"] for entry in entries if entry["action"] == f"by {index}"]
        assert mine == [str(number) for number in range(500)]


def test_a_head_is_signed_in_time_and_goes_to_syslog(
    tmp_path: Path, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though few entries come; and what syslog has is what verify takes."""
    monkeypatch.setattr(log_module, "HEAD_S", 0.05)
    address = str(tmp_path / "s")
    path = tmp_path / "a.jsonl"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.settimeout(10)
        log = AuditLog(str(path), signer, syslog=Syslog(address))
        log.open()
        log.note({"action": "test", "outcome": "done"})
        line = listener.recv(4096).decode()
        assert line.startswith("<85>1 20") and " tokenmill " in line
        head = line.partition("head=")[2].partition(" ")[0]
        status = log.status()
        assert (status["seq"], status["head"]["hash"], status["syslog"]["lost"]) == (1, head[2:], 0)
        log.close()
    public = str(load_public(tmp_path, signer))
    assert main(["audit", "verify", str(path), "--public-key", public, "--head", head]) == 0
    assert main(["audit", "verify", str(path), "--head", "1:" + "0" * 64]) == 1


def load_public(folder: Path, signer: Signer) -> Path:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = Ed25519PublicKey.from_public_bytes(signer.public.raw)
    path = folder / "public.pem"
    path.write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert load_verifier(str(path), "KEY").key_id == signer.key_id
    return path


def test_a_syslog_that_is_not_there_costs_nothing_but_a_count(tmp_path: Path, signer: Signer) -> None:
    syslog = Syslog(str(tmp_path / "nobody"))
    write(tmp_path / "a.jsonl", signer, syslog=syslog)
    assert syslog.status()["lost"] == 1


def test_a_log_that_cannot_be_written_says_so_until_it_can(
    tmp_path: Path, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then has every entry, none twice."""
    monkeypatch.setattr(log_module, "_RETRY_S", 0.01)
    path = tmp_path / "a.jsonl"
    log = AuditLog(str(path), signer)
    log.open()
    has_failed, is_mended = threading.Event(), threading.Event()
    real = segments._write

    def full(fd: int, data: bytes) -> None:
        if not is_mended.is_set():
            os.write(fd, data[: len(data) // 2])
            has_failed.set()
            raise OSError(28, "No space left on device")
        real(fd, data)

    monkeypatch.setattr(segments, "_write", full)
    log.note({"action": "first", "outcome": "done"})
    assert has_failed.wait(30)
    while not log.why_not:
        threading.Event().wait(0.001)
    assert log.why_not == "No space left on device"
    log.note({"action": "second", "outcome": "done"})
    is_mended.set()
    log.close()
    assert log.why_not == ""
    assert [json.loads(line)["action"] for line in path.read_bytes().splitlines()] == ["first", "second"]
    assert look(path, signer).problems == []


def test_a_queue_that_grows_too_long_is_told(tmp_path: Path, signer: Signer, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(str(tmp_path / "a"), signer)
    monkeypatch.setattr(log_module, "MAX_PENDING", 2)
    for _ in range(3):
        log.note({"action": "test"})
    assert log.why_not == "it cannot keep up"


def test_an_entry_that_cannot_be_made_does_not_end_the_log(tmp_path: Path, signer: Signer) -> None:
    path = tmp_path / "a.jsonl"
    log = AuditLog(str(path), signer)
    log.open()
    log.note(lambda: {}["missing"])
    log.note({"action": "test", "object": b"no JSON"})
    log.note({"action": "test", "outcome": "done"})
    log.close()
    actions = [json.loads(line)["action"] for line in path.read_bytes().splitlines()]
    assert actions == ["log.bug", "log.bug", "test"]


def test_keys_are_for_their_owner_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k.pem"
    assert main(["audit", "keygen", str(path)]) == 0
    assert "PRIVATE" not in capsys.readouterr().out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main(["audit", "keygen", str(path)]) == 2
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 640\): chmod 600"):
        load_signer(str(path), "--audit-key")
    path.chmod(0o600)
    assert main(["audit", "verify", str(tmp_path / "none"), "--public-key", f"{path}.pub"]) == 2
    assert main(["audit", "verify", str(tmp_path / "none")]) == 2
    with pytest.raises(ConfigError, match="is no public key"):
        load_verifier(str(path), "--public-key")
    with pytest.raises(ConfigError, match="is no private key"):
        public = Path(f"{path}.pub")
        public.chmod(0o600)
        load_signer(str(public), "--audit-key")


def test_options_that_do_not_go_together_are_refused(tmp_path: Path, key: Path) -> None:
    log = str(tmp_path / "a.jsonl")
    for given, message in (
        ({"audit_log": log}, "needs --audit-key"),
        ({"audit_key": str(key)}, "needs --audit-log"),
        ({"audit_log": log, "audit_key": str(key), "audit_calls": "some"}, "audit-calls"),
        ({"audit_log": log, "audit_key": str(key), "audit_max_bytes": 10}, "at least 4096"),
    ):
        with pytest.raises(ConfigError, match=message):
            AuditOptions(**given)
    with pytest.raises(ConfigError, match="outside of the audit log's folder"):
        AuditOptions(audit_log=str(key.parent / "a.jsonl"), audit_key=str(key)).open(Mask())
    with pytest.raises(ConfigError, match="--audit-syslog must be"):
        AuditOptions(audit_log=log, audit_key=str(key), audit_syslog="somewhere").open(Mask())
    assert AuditOptions().open(Mask()) is None
