"""Doors and boards: who is given KV, and who is not."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from links import certificate
from tokenmill.cli.worker_options import LinkOptions
from tokenmill.core.mac import TAMPERED, connection_macs
from tokenmill.core.moves import KVSource, PullBlocks, Pulled
from tokenmill.kv.transfer.peer import client as peer_client
from tokenmill.kv.transfer.peer import server as peer_listener
from tokenmill.kv.transfer.peer import server as peer_server
from tokenmill.kv.transfer.peer.board import BlockMemory, Board, CannotRead, Had, Refused, can_read_memory, read_memory
from tokenmill.kv.transfer.peer.client import PeerAuth, PeerClient, connect_plainly, dial
from tokenmill.kv.transfer.peer.frames import MOST_BYTES, BadPeer, Connection
from tokenmill.kv.transfer.peer.server import PeerServer
from tokenmill.net.tcp import Credentials

BLOCK_BYTES = 64


def memory_of(value: int) -> BlockMemory:
    import ctypes

    data = (ctypes.c_uint8 * (8 * BLOCK_BYTES))(*[value] * (8 * BLOCK_BYTES))
    return BlockMemory(memoryview(data).cast("B"), ctypes.addressof(data), BLOCK_BYTES)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@pytest.fixture
def board() -> Iterator[Board]:
    """Three blocks, of which the last has one token, under the ticket `t`."""
    board = Board(block_size=4)
    board.post("t", [(0, 0, 5), (0, 1, 6), (0, 2, 7)], 9, True, lambda: None)
    yield board
    board.close()


def sums_of(board: Board, memory: BlockMemory) -> None:
    from zlib import crc32

    board.note_sums("t", {(0, index): crc32(memory.block(5 + index)) for index in range(3)})


def pull(
    server: PeerServer, target: BlockMemory, *, ticket: str = "t", life: str = "life", secret: bytes = b""
) -> Pulled:
    connect = PeerAuth(secret).connect if secret else connect_plainly
    client = PeerClient("reader", "elsewhere", [target], 4, connect)
    try:
        source = KVSource("w", life, server.address, "elsewhere", ticket)
        client.may_read = False
        return client.pull(PullBlocks(0, source, 0, ((1, 2, 3),)), threading.Event())
    finally:
        client.close()


def test_blocks_come_where_they_were_reserved_and_nowhere_else(board: Board) -> None:
    source, target = memory_of(7), memory_of(0)
    sums_of(board, source)
    server = PeerServer(board, "life", [source])
    server.start()
    try:
        assert pull(server, target) == Pulled(9, 9, True, ())
        assert [set(target.block(block)) for block in range(5)] == [{0}, {7}, {7}, {7}, {0}]
        for wrong in ({"ticket": "other"}, {"life": "another"}):
            with pytest.raises(Refused):
                pull(server, target, **wrong)
    finally:
        server.close()


@pytest.mark.skipif(not has_ipv6(), reason="This machine has no IPv6.")
def test_an_address_may_be_one_of_ipv6(board: Board) -> None:
    source = memory_of(7)
    sums_of(board, source)
    server = PeerServer(board, "life", [source])
    server.start("::1")
    try:
        assert server.address.startswith("[::1]:")
        assert pull(server, memory_of(0)).num_tokens == 9
    finally:
        server.close()


def test_blocks_that_are_not_there_are_told() -> None:
    """Also where none is: those that a window has left behind are not sent, and what comes after them is to come."""
    board = Board(block_size=4)
    board.post("t", [], 8, False, lambda: None)
    server = PeerServer(board, "life", [memory_of(7)])
    server.start()
    try:
        target = memory_of(0)
        assert pull(server, target) == Pulled(8, 8, False, ((0, 0), (0, 1)))
        assert set(target.view) == {0}
    finally:
        server.close()


def test_a_process_that_is_gone_is_no_reason_not_to_read_others(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = memory_of(7), memory_of(0)
    sums_of(board, source)
    monkeypatch.setattr(peer_server, "os", SimpleNamespace(getpid=lambda: 2**22 + 5))
    server = PeerServer(board, "life", [source])
    server.start()
    client = PeerClient("reader", "here", [target], 4)
    try:
        job = PullBlocks(0, KVSource("w", "life", server.address, "here", "t"), 0, ((1, 2, 3),))
        assert client.pull(job, threading.Event()).num_tokens == 9
        assert set(target.block(1)) == {7} and client.may_read == can_read_memory()
    finally:
        client.close()
        server.close()


def test_connections_nobody_uses_are_not_kept(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each life of a worker has another address."""
    monkeypatch.setattr(peer_client, "KEEP_S", 0.0)
    source = memory_of(7)
    sums_of(board, source)
    servers = [PeerServer(board, "life", [source]) for _ in range(3)]
    client = PeerClient("reader", "elsewhere", [memory_of(0)], 4)
    client.may_read = False
    try:
        for server in servers:
            server.start()
            client.pull(
                PullBlocks(0, KVSource("w", "life", server.address, "elsewhere", "t"), 0, ((1, 2, 3),)),
                threading.Event(),
            )
        assert [*client._idle] == [servers[-1].address]
    finally:
        client.close()
        for server in servers:
            server.close()


def test_connections_are_taken_again_after_there_were_no_descriptors(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short:
        """A listener."""

        def __init__(self, listener: socket.socket) -> None:
            self.listener, self.num_failures = listener, 2

        def accept(self) -> tuple[socket.socket, object]:
            if self.num_failures:
                self.num_failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self.listener.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self.listener, name)

    source, create = memory_of(7), socket.create_server
    sums_of(board, source)
    monkeypatch.setattr(peer_listener, "PAUSE_S", 0.01)
    monkeypatch.setattr(socket, "create_server", lambda *args, **kwargs: Short(create(*args, **kwargs)))
    server = PeerServer(board, "life", [source])
    server.start()
    try:
        assert pull(server, memory_of(0)).num_tokens == 9
    finally:
        server.close()


def test_a_closed_server_ends_connections_that_were_wrapped(board: Board) -> None:
    """As TLS does: what was accepted is detached."""
    source = memory_of(7)
    sums_of(board, source)
    server = PeerServer(board, "life", [source], lambda raw: Connection(socket.socket(fileno=raw.detach())))
    server.start()
    client = PeerClient("reader", "elsewhere", [memory_of(0)], 4)
    client.may_read = False
    try:
        client.pull(
            PullBlocks(0, KVSource("w", "life", server.address, "elsewhere", "t"), 0, ((1, 2, 3),)), threading.Event()
        )
        server.close()
        ((_, connection),) = client._idle[server.address]
        assert connection.raw.recv(1) == b""
    finally:
        client.close()


def test_a_ticket_is_for_one_reader(board: Board) -> None:
    assert board.take("t", "one", 0, 3, False, 0.0) is not None
    with pytest.raises(Refused, match="used by another"):
        board.take("t", "other", 0, 3, False, 0.0)


def test_what_was_withdrawn_or_changed_is_not_to_be_used(board: Board) -> None:
    source = memory_of(7)
    sums_of(board, source)
    part = board.take("t", "one", 0, 3, False, 0.0)
    assert part is not None
    with pytest.raises(Refused, match="did not come as they were sent"):
        board.check("t", "one", Had(part.generation, {(0, 0): 1}, 9, True))
    board.withdraw("t")
    board.post("t", [(0, 0, 1)], 4, False, lambda: None)
    with pytest.raises(Refused, match="given back"):
        board.check("t", "one", Had(part.generation, {}, 9, True))


def test_posts_are_over_when_the_reader_has_them() -> None:
    board, over = Board(block_size=4), []
    board.post("t", [(0, 0, 1)], 4, False, lambda: over.append("first"))
    first = board.take("t", "one", 0, 8, False, 0.0)
    assert first is not None and not first.is_last and first.num_tokens == 4
    board.post("t", [], 4, True, lambda: over.append("last"))
    board.check("t", "one", Had(first.generation, {}, 4, False))
    assert over == ["first"], "the reader has not been told that this was all"
    board.check("t", "one", Had(first.generation, {}, 4, True))
    assert over == ["first", "last"]


def test_between_machines_both_ends_prove_themselves(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_client, "_is_local", lambda address: False)
    source = memory_of(7)
    sums_of(board, source)
    server = PeerServer(board, "life", [source], PeerAuth(b"s" * 32).welcome)
    server.start()
    try:
        assert pull(server, memory_of(0), secret=b"s" * 32).num_tokens == 9
        for secret in (b"another secret!!!", b""):
            with pytest.raises((OSError, EOFError, BadPeer)):
                pull(server, memory_of(0), secret=secret)
    finally:
        server.close()


def test_a_certificate_need_not_name_where_a_worker_is_reached(
    board: Board, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pod's address is nobody's name. A certificate of another authority is refused."""
    monkeypatch.setattr(peer_client, "_is_local", lambda address: False)
    auths = {}
    for name, text in (("own", certificate()), ("other", certificate.__wrapped__())):
        file = tmp_path / name
        file.write_text(text)
        link = LinkOptions(worker_tls_cert=str(file), worker_tls_ca=str(file))
        auths[name] = link.peer_auth(Credentials(b"s" * 32, link.tls(is_front_end=False)))
    source = memory_of(7)
    sums_of(board, source)
    server = PeerServer(board, "life", [source], auths["own"].welcome)
    server.start("127.0.0.2")
    client = PeerClient("reader", "elsewhere", [memory_of(0)], 4, auths["own"].connect, may_read=False)
    try:
        job = PullBlocks(0, KVSource("w", "life", server.address, "elsewhere", "t"), 0, ((1, 2, 3),))
        with pytest.raises(ssl.SSLError):
            auths["other"].connect(server.address)
        assert client.pull(job, threading.Event()).num_tokens == 9
    finally:
        client.close()
        server.close()


def tagged_pair() -> tuple[Connection, Connection]:
    near, far = socket.socketpair()
    for end in (near, far):
        end.settimeout(5)
    source = Connection(near, *connection_macs(b"s" * 32, b"nonces", b"kv source", b"kv reader"))
    return source, Connection(far, *connection_macs(b"s" * 32, b"nonces", b"kv reader", b"kv source"))


def frames_of(*messages: dict[str, object]) -> list[bytes]:
    """As the source sends them on a fresh connection."""
    source, reader = tagged_pair()
    with source.raw, reader.raw:
        sent = []
        for message in messages:
            source.send(message)
            sent.append(reader.raw.recv(4096))
        return sent


def heard(sent: bytes, *, at_source: bool = False) -> list[object]:
    """What the reader, or the source, takes of these bytes before it ends the connection."""
    source, reader = tagged_pair()
    near, far = (reader, source) if at_source else (source, reader)
    taken: list[object] = []
    with source.raw, reader.raw:
        near.raw.sendall(sent)
        near.raw.shutdown(socket.SHUT_WR)
        try:
            while True:
                taken.append(far.receive())
        except EOFError:
            return [*taken, "gone"]
        except BadPeer as error:
            assert str(error) == TAMPERED
            return [*taken, "tampered"]


def test_messages_that_are_not_the_next_one_end_a_connection_between_machines() -> None:
    """Changed in any bit, repeated, left out, moved or sent back."""
    first, second = {"number": 1}, {"number": 2}
    one, two = frames_of(first, second)
    assert heard(one + two) == [first, second, "gone"]
    for bit in range(8 * len(one)):
        changed = bytearray(one)
        changed[bit // 8] ^= 1 << bit % 8
        assert heard(bytes(changed) + two) == ["tampered"]
    assert heard(one + one) == [first, "tampered"]
    assert heard(two) == heard(two + one) == ["tampered"]
    assert heard(one, at_source=True) == ["tampered"]


def test_no_bit_that_changes_between_machines_is_overlooked(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of messages or blocks, wherever in what the source sends behind its proof."""
    monkeypatch.setattr(peer_client, "_is_local", lambda address: False)
    source = memory_of(7)
    sums_of(board, source)
    auth, num_sent = PeerAuth(b"s" * 32), 0

    class Noisy:
        """A socket that changes a bit of what it sends."""

        def __init__(self, raw: socket.socket, at: int) -> None:
            self.raw, self.at, self.num_sent = raw, at, 0

        def sendall(self, data: bytes) -> None:
            nonlocal num_sent
            changed, place = bytearray(data), self.at - self.num_sent
            if 0 <= place < len(changed):
                changed[place] ^= 1 << self.at % 8
            self.num_sent += len(changed)
            num_sent = max(num_sent, self.num_sent)
            self.raw.sendall(changed)

        def __getattr__(self, name: str) -> object:
            return getattr(self.raw, name)

    at = -1

    def welcome(raw: socket.socket) -> Connection:
        connection = auth.welcome(raw)
        connection.raw = Noisy(connection.raw, at)  # type: ignore[assignment]
        return connection

    server = PeerServer(board, "life", [source], welcome)
    server.start()
    try:
        assert pull(server, memory_of(0), secret=b"s" * 32).num_tokens == 9
        for at in range(0, num_sent, 5):  # noqa: B007  (`welcome` reads it)
            with pytest.raises((BadPeer, Refused)):
                pull(server, memory_of(0), secret=b"s" * 32)
        at = -1
        assert pull(server, memory_of(0), secret=b"s" * 32).num_tokens == 9
    finally:
        server.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff",
        (MOST_BYTES + 1).to_bytes(4, "little"),
        framed(b"[]"),
        framed(b"{...}"),
        framed(b"{}"),
        framed(b"[" * 100_000),
        framed(
            b'{"incarnation":"life","ticket":"t","reader":"r","ask":"pull","start":1e999,"count":1,"is_final":true}'
        ),
    ],
)
def test_garbage_ends_its_connection_alone(board: Board, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    source = memory_of(7)
    sums_of(board, source)
    server = PeerServer(board, "life", [source])
    server.start()
    try:
        with dial(server.address) as connection:
            connection.sendall(sent)
            assert connection.recv(1) == b"", "it was not closed"
        assert len([each for each in caplog.messages if "was closed" in each]) == 1
        assert pull(server, memory_of(0)).num_tokens == 9
    finally:
        server.close()


def test_memory_of_nobody_cannot_be_read() -> None:
    target = memory_of(0)
    with pytest.raises(CannotRead):
        read_memory(os.getpid(), [(8, target.address, BLOCK_BYTES)])
    with pytest.raises(CannotRead):
        read_memory(2**22 + 5, [(target.address, target.address, BLOCK_BYTES)])


def test_a_server_that_is_closed_takes_nobody(board: Board) -> None:
    server = PeerServer(board, "life", [memory_of(7)])
    server.start()
    address = server.address
    server.close()
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 1) as end:
        end.sendall(b"x")
        if not end.recv(1):
            raise ConnectionResetError
