"""Reading KV events of others: by real sockets, with gaps, other lives and garbage; and what is known then."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from functools import wraps
from random import Random
from typing import Any

import msgspec
import pytest

from kv_tree import Tree
from scripted import InlineSandbox, make_text_model
from tokenmill.api.sandbox import Caller
from tokenmill.cli.upstream_options import FeedAddress, UpstreamOptions, _named_feed
from tokenmill.cluster.token_index import TokenIndex
from tokenmill.core.errors import ConfigError
from tokenmill.core.kv_events import CLEARED, REMOVED, STORED, TokenEvent
from tokenmill.core.tenant import ANYONE, Tenant
from tokenmill.core.tiers import DISK, HOST
from tokenmill.net.kv_endpoints import KVEventsConfig
from tokenmill.net.kv_events import decode_batch, encode_batch, replayed
from tokenmill.net.kv_publisher import KVPublisher
from tokenmill.net.kv_subscriber import KVSubscriber
from tokenmill.server.upstream.prefixes import Known, Prefixes
from tokenmill.server.upstream.proxy import best

zmq = pytest.importorskip("zmq")
ANY = "tcp://127.0.0.1:0"
pack = msgspec.msgpack.encode


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **given: Any) -> None:
        asyncio.run(test(*args, **given))

    return run


def stored(*names: int, parent: int | None = None, size: int = 2) -> TokenEvent:
    """Each block's tokens are its name, again and again."""
    return TokenEvent(STORED, names, parent, tuple(name for name in names for _ in range(size)), size)


class Heard(Tree):
    def __init__(self) -> None:
        super().__init__()
        self.num_cleared = 0

    def hear(self, events: tuple[TokenEvent, ...] | list[TokenEvent]) -> None:
        known = [each for each in events if each.kind != STORED or each.parent is None or each.parent in self.prefixes]
        self.num_cleared += any(event.kind == CLEARED for event in events)
        super().hear(known)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)

    async def holds(self, *names: int) -> None:
        await self.until(lambda: set(self.prefixes) == set(names))


@asynccontextmanager
async def reading(publisher: KVPublisher, *, replays: bool = True) -> AsyncIterator[tuple[KVSubscriber, Heard]]:
    heard = Heard()
    reader = KVSubscriber(publisher.endpoint, publisher.replay_endpoint if replays else "")
    reader.open(heard.hear)
    num_heard = 0
    async with asyncio.timeout(30):
        while num_heard < 2:  # the first may come by a replay, the next does by the subscription
            publisher.publish(())
            await asyncio.sleep(0.02)
            num_heard += reader._expected == publisher._num
    try:
        yield reader, heard
    finally:
        await asyncio.to_thread(reader.close)


def publisher(endpoint: str = ANY, replay: str = ANY, **given: Any) -> Any:
    return closing(KVPublisher(KVEventsConfig(True, "zmq", endpoint, replay, **given)))


@on_loop
async def test_who_comes_late_is_told_all_and_then_follows() -> None:
    with publisher() as out:
        out.publish((TokenEvent(CLEARED), stored(1, 2)))
        async with reading(out) as (reader, heard):
            await heard.holds(1, 2)
            out.publish((stored(3, parent=2), stored(9)))
            out.publish((TokenEvent(REMOVED, (1,)), TokenEvent(REMOVED, (9,))))
            await heard.holds(2, 3)
            assert heard.prefixes[3] == (1, 1, 2, 2, 3, 3)
            assert reader.num_bad == 0


@pytest.mark.parametrize("is_kept", [True, False])
@on_loop
async def test_what_is_missed_is_asked_for_or_nothing_is_believed(is_kept: bool) -> None:
    with publisher(buffer_steps=100 if is_kept else 1) as out:
        async with reading(out) as (reader, heard):
            out.publish((stored(1),))
            await heard.holds(1)
            num_cleared, num_gaps, pub = heard.num_cleared, reader.num_gaps, out._pub
            out._pub = type("Deaf", (), {"send_multipart": lambda self, frames: None})()
            out.publish((stored(2, parent=1),))
            out.publish((stored(3, parent=2),))
            await heard.until(lambda: not out._waiting)
            await asyncio.sleep(0.05)
            out._pub = pub
            out.publish((stored(4),))
            await heard.holds(*((1, 2, 3, 4) if is_kept else (4,)))
            assert reader.num_gaps == num_gaps + 1 and (heard.num_cleared == num_cleared) == is_kept


@pytest.mark.parametrize("replays", [True, False])
@on_loop
async def test_another_life_is_another_cache(replays: bool) -> None:
    with publisher() as out:
        endpoint, replay = out.endpoint, out.replay_endpoint
        async with reading(out, replays=replays) as (_, heard):
            await heard.until(lambda: heard.num_cleared > 0)
            for number in range(5):
                out.publish((stored(number),))
            await heard.until(lambda: 4 in heard.prefixes)
            out.close()
            await heard.holds()
            with publisher(endpoint, replay) as again:
                again.publish((stored(70),))
                await heard.until(lambda: heard.num_cleared > 2)
                for number in range(71, 500):  # until there is a subscription again
                    again.publish((stored(number),))
                    await asyncio.sleep(0.01)
                    if number in heard.prefixes:
                        break
                assert not {0, 1, 2, 3, 4} & set(heard.prefixes) and (70 in heard.prefixes or not replays)
                out.close = lambda: None  # type: ignore[method-assign]


@on_loop
async def test_garbage_costs_one_line_and_nothing_is_believed_after_it(caplog: pytest.LogCaptureFixture) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as pub:
        pub.linger = 0
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        heard = Heard()
        reader = KVSubscriber(f"tcp://127.0.0.1:{port}")
        with caplog.at_level(logging.INFO):
            reader.open(heard.hear)
            await heard.until(lambda: heard.num_cleared > 0)
            number = 0

            def send(*frames: bytes) -> None:
                nonlocal number
                pub.send_multipart(
                    frames or (b"", struct.pack(">Q", number), encode_batch(time.time(), (stored(1),), 0))
                )
                number += 1

            while not heard.prefixes:
                send()
                await asyncio.sleep(0.02)
            random = Random(1)
            for _ in range(50):
                send(*(random.randbytes(random.randrange(40)) for _ in range(random.randrange(1, 5))))
            send(b"", struct.pack(">Q", number), b"\xc1" * 30)
            await heard.holds()
            num_bad = reader.num_bad
            send()
            await heard.holds(1)
        await asyncio.to_thread(reader.close)
        assert num_bad >= 40 and len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1


def test_both_forms_are_read() -> None:
    """Maps, and the arrays of older vLLMs; with numbers or bytes as names, more fields, and types to come."""
    row = [b"\x05" * 32, 7]
    arrays = [
        ["BlockStored", row, None, [1, 2, 3, 4], 2, None],
        ["BlockStored", [9], 7, [5, 6], 2, None, "GPU"],
        ["BlockRemoved", [9]],
        ["AllBlocksCleared"],
    ]
    maps = [
        {"type": "BlockStored", "block_hashes": row, "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
         "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None, None],
         "group_idx": 0, "kv_cache_spec_kind": "full_attention", "locality": "LOCAL"},
        {"type": "BlockStored", "block_hashes": [9], "parent_block_hash": 7, "token_ids": [5, 6], "block_size": 2,
         "lora_id": None, "medium": None, "lora_name": None},
        {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]  # fmt: skip
    expected = [
        TokenEvent(STORED, (b"\x05" * 32, 7), None, (1, 2, 3, 4), 2),
        TokenEvent(STORED, (9,), 7, (5, 6), 2),
        TokenEvent(REMOVED, (9,)),
        TokenEvent(CLEARED),
    ]
    assert decode_batch(pack([1.5, arrays])) == (1.5, expected)
    offloaded = [{**maps[0], "token_ids": [], "medium": "CPU"}, {**maps[2], "medium": "STORAGE"}]
    assert decode_batch(pack([1.5, offloaded]))[1] == [
        TokenEvent(STORED, (b"\x05" * 32, 7), None, (), 2, tier=HOST),
        TokenEvent(REMOVED, (9,), tier=DISK),
    ]
    assert decode_batch(pack([1.5, maps, 0, "more"])) == (1.5, expected)
    mixed = [{"type": "BlockSeen", "x": 1}, ["BlockSeen", 5], maps[3]]
    assert decode_batch(pack([1.5, mixed, None]))[1] == [TokenEvent(CLEARED)]


def test_blocks_that_are_not_for_all_prompts_do_not_count() -> None:
    """Of adapters, salts, images, other tiers and other groups of layers."""
    plain = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5, 6],
             "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None}  # fmt: skip
    others: list[dict[str, Any]] = [
        {"lora_id": 1}, {"lora_name": "x"}, {"extra_keys": [["salt"]]}, {"medium": "HBM2"}, {"group_idx": 1}
    ]  # fmt: skip
    assert len(decode_batch(pack([0.0, [plain]]))[1]) == 1
    for other in others:
        assert decode_batch(pack([0.0, [plain | other]]))[1] == []
    for wrong in ({"token_ids": [5]}, {"token_ids": [-1, 2]}, {"block_size": 0}, {"block_hashes": ["x"]}):
        with pytest.raises(ValueError):
            decode_batch(pack([0.0, [plain | wrong]]))
    for payload in (b"", b"\xc1", pack([1.0]), pack([1.0, [5]]), pack([1.0, [[]]]), pack({"ts": 1}), b"\x91" * 5000):
        with pytest.raises(ValueError):
            decode_batch(payload)


def test_both_forms_of_a_replay_are_read() -> None:
    seq = (5).to_bytes(8, "big")
    assert replayed([b"", b"kv", seq, b"p"]) == replayed([b"", seq, b"p"]) == (5, b"p")
    assert replayed([b"", b"", b"\xff" * 8, b""]) == replayed([b"", b"\xff" * 8, b""]) == (-1, b"")
    for frames in ([], [b""], [b"", b"x", b"y"], [b"a", b"b", b"c", b"d", b"e"]):
        with pytest.raises(ValueError):
            replayed(frames)


def test_an_index_by_tokens_knows_who_has_a_prompt() -> None:
    """Whatever servers call their blocks, and however large these are."""
    index = TokenIndex(3)
    prompt = tuple(range(100, 120))
    assert index.keys(prompt) == {} and index.hits(index.keys(prompt)) == {}
    index.hear(
        0, [TokenEvent(STORED, (b"a", b"b"), None, prompt[:8], 4), TokenEvent(STORED, (b"c",), b"b", prompt[8:12], 4)]
    )
    index.hear(1, [TokenEvent(STORED, (1,), None, prompt[:8], 8), TokenEvent(STORED, (2,), 1, prompt[8:16], 8)])
    index.hear(2, [TokenEvent(STORED, (1,), None, prompt[:4], 4), TokenEvent(STORED, (7,), 6, prompt[4:8], 4)])
    assert index.hits(index.keys(prompt)) == {0: 12, 1: 16, 2: 4}
    assert index.hits(index.keys(prompt[1:])) == {}
    assert index.hits(index.keys((*prompt[:9], 0, 0, 0))) == {
        0: 8,
        1: 8,
        2: 4,
    }
    index.hear(0, [TokenEvent(REMOVED, (b"c", b"x"))])
    index.hear(1, [TokenEvent(CLEARED)])
    assert index.hits(index.keys(prompt)) == {0: 8, 2: 4}
    index.expect(2, "call", index.keys(prompt))
    assert index.hits(index.keys(prompt)) == {0: 8, 2: 20}
    index.settle("call")
    assert index.hits(index.keys(prompt)) == {0: 8, 2: 4}


def test_a_prompt_counts_as_long_as_a_server_has_it_anywhere() -> None:
    """vLLM tells of what it offloads without tokens; others may tell them."""
    index, prompt = TokenIndex(1), tuple(range(100, 112))
    index.hear(0, [TokenEvent(STORED, (1, 2), None, prompt[:8], 4)])
    index.hear(0, [TokenEvent(STORED, (1, 2, 9), None, (), 4, tier=HOST), TokenEvent(REMOVED, (1, 2))])
    assert index.hits(index.keys(prompt)) == {0: 8}
    index.hear(0, [TokenEvent(STORED, (3,), 2, prompt[8:], 4, tier=DISK), TokenEvent(REMOVED, (2,), tier=DISK)])
    assert index.hits(index.keys(prompt)) == {0: 12}
    index.hear(0, [TokenEvent(REMOVED, (3,), tier=DISK), TokenEvent(REMOVED, (2,), tier=HOST)])
    assert index.hits(index.keys(prompt)) == {0: 4} and index.num_blocks(0) == 1


def test_the_index_of_a_server_is_bounded() -> None:
    index = TokenIndex(1, most_blocks=3)
    for number in range(10):
        index.hear(0, [stored(number)])
    assert index.num_blocks(0) == 3
    index.hear(0, [TokenEvent(REMOVED, (0,)), stored(50)])
    assert index.num_blocks(0) == 3
    assert index.hits(index.keys((50, 50))) == {0: 2} and not index.hits(index.keys((7, 7)))


@pytest.mark.parametrize(
    ("num_open", "shares", "place"),
    [
        ((), (), None),
        ((3, 1, 1), (0, 0, 0), 1),
        ((1, 1), (0.0, 0.2), 1),
        ((2, 0), (0.9, 0.0), 1),
        ((11, 9), (0.9, 0.0), 0),
        ((30, 0), (1.0, 0.0), 1),
    ],
)
def test_a_cached_prompt_is_weighed_against_load(num_open: Any, shares: Any, place: int | None) -> None:
    assert best(num_open, [0] * len(num_open), shares) == place


class Fed:
    """A feed that tells what it is given."""

    def __init__(self) -> None:
        self.is_closed = False

    def open(self, hear: Callable[[tuple[TokenEvent, ...]], None]) -> None:
        self.tell = hear

    def close(self) -> None:
        self.is_closed = True


@on_loop
async def test_prompts_are_read_as_an_upstream_does() -> None:
    text = make_text_model()
    feeds, ended = [Fed(), Fed()], []

    async def on_close() -> None:
        ended.append(True)

    prefixes = Prefixes(text, InlineSandbox(text), feeds, lambda: ended.append(False), on_close)
    prefixes.open()
    tokens = tuple(text.tokenizer.encode("to be or not to be", add_special=True))
    body = pack_json({"model": "far", "prompt": "to be or not to be"})
    assert await prefixes.read("/v1/completions", body, Caller()) == Known(), "nobody has told anything"
    feeds[1].tell((TokenEvent(STORED, (1, 2), None, tokens[:4], 2),))
    known = await prefixes.read("/v1/completions", body, Caller())
    assert known.num_tokens == len(tokens) and prefixes.hits(known) == {1: 4} and prefixes.num_blocks(1) == 2
    ids = pack_json({"model": "far", "prompt": list(tokens)})
    assert await prefixes.read("/v1/completions", ids, Caller()) == known
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    assert (await prefixes.read("/v1/chat/completions", pack_json(chat), Caller())).num_tokens > 0
    salted = Caller(tenant=Tenant(**{**{k: getattr(ANYONE, k) for k in ANYONE.__slots__}, "salt": "s"}))
    for path, data, caller in (
        ("/v1/completions", pack_json({"prompt": "to be", "cache_salt": "mine"}), Caller()),
        ("/v1/completions", body, salted),
        ("/v1/completions", pack_json({"prompt": 5}), Caller()),
        ("/v1/completions", b"{", Caller()),
        ("/v1/embeddings", body, Caller()),
    ):
        assert await prefixes.read(path, data, caller) == Known()
    prefixes.given(1, "c", known)
    assert prefixes.hits(known)[1] == len(tokens) // 2 * 2 > 4
    prefixes.over("c")
    assert prefixes.hits(known) == {1: 4}
    await prefixes.close()
    assert all(feed.is_closed for feed in feeds) and ended == [False, True]


def pack_json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def test_flags_name_the_feed_of_each_upstream() -> None:
    assert _named_feed("a=tcp://h:1,replay=tcp://h:2") == FeedAddress("a", "tcp://h:1", "tcp://h:2")
    assert _named_feed("a=tcp://h:1") == FeedAddress("a", "tcp://h:1")
    for wrong in (
        "",
        "a",
        "=tcp://h:1",
        "a=http://h:1",
        "a=tcp://h",
        "a=tcp://h:1,again=tcp://h:2",
        "a=tcp://h:1,replay=",
    ):
        with pytest.raises(ValueError, match="must be NAME=tcp"):
            _named_feed(wrong)
    up = (("a", "http://h:1"), ("a", "http://h:2"), ("b", "http://h:3"))
    feed = FeedAddress("a", "tcp://h:1")
    for given, why in (
        ({"upstream_kv_events": (feed,)}, "given 1 times and --upstream a 2 times"),
        ({"upstream_kv_events": (feed, feed)}, "needs --upstream-tokenizer a=MODEL"),
        ({"upstream_tokenizer": (("b", "m"),)}, "needs --upstream-kv-events b=ADDRESS"),
        ({"upstream_kv_events": (feed, feed), "upstream_tokenizer": (("a", "m"), ("a", "n"))}, "is given twice"),
    ):
        with pytest.raises(ConfigError, match=why):
            UpstreamOptions(upstream=up, **given)  # type: ignore[arg-type]
    UpstreamOptions(upstream=up, upstream_kv_events=(feed, feed), upstream_tokenizer=(("a", "m"),))
