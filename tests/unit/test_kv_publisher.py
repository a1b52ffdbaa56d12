"""KV events over real sockets: what is published is what is cached, in vLLM's form; and a flag that says where."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from random import Random
from typing import Any

import msgspec
import pytest
from test_engine_core import Engine, make_request
from test_engine_kv_events import CONFIG, request, run

from kv_tree import Tree
from tokenmill.cli.engine_process import Launch
from tokenmill.cli.kv_events_options import KVEventsOptions, read_config
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import StepFailed
from tokenmill.core.errors import ConfigError
from tokenmill.core.events import Abort, Submit
from tokenmill.core.kv_events import CLEARED, REMOVED, STORED, TokenEvent
from tokenmill.core.sequence import Sequence
from tokenmill.core.step import StepPlan
from tokenmill.core.tiers import DISK, HOST, TierEvent, TierEvents
from tokenmill.engine.core import EngineCore
from tokenmill.kv.events.publisher import TierEventPublisher
from tokenmill.net.kv_endpoints import KVEventsConfig, is_local, listens, nth_endpoint
from tokenmill.net.kv_events import decode_batch, encode_batch
from tokenmill.net.kv_publisher import KVPublisher
from tokenmill.node.options import EngineOptions

zmq = pytest.importorskip("zmq")
ANY = "tcp://127.0.0.1:0"
STORE = TokenEvent(STORED, (b"\x01" * 16, b"\x02" * 16), None, (1, 2, 3, 4), 2)


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_told_of_what_is_published_without_a_salt(seed: int) -> None:
    """Random requests on a pool that runs over, with aborts and failed steps."""
    random = Random(seed)
    core, tree = EngineCore(CONFIG), Tree()
    core.state.tell_tokens(tree.hear)
    pool = core.state.blocks.full_pool
    assert pool is not None
    in_flight: list[StepPlan] = []
    seen: dict[bytes, tuple[tuple[int, ...], bool]] = {}
    sequences: dict[int, Sequence] = {}
    for number in range(150):
        if random.random() < 0.5 and number < 130:
            base = random.randrange(3) * 100
            prompt = tuple(range(base, base + random.randrange(1, 60)))
            core.handle(Submit((request(f"r{number}", prompt, cache_salt=random.choice(("", "", "s"))),)), 0.0)
        elif random.random() < 0.1:
            core.handle(Abort(core.open_ids[:1]), 0.0)
        if (plan := core.plan(0.0)) is not None:
            in_flight.append(plan)
        sequences.update((seq.number, seq) for seq in core.state.by_id.values())
        if in_flight and (len(in_flight) == 2 or random.random() < 0.5):
            plan = in_flight.pop(0)
            if random.random() < 0.05:
                core.handle(StepFailed(plan.step, "on fire"), 0.0)
            else:
                run(core, plan)
            for seq in sequences.values():
                for index, key in enumerate(seq.keys):
                    seen[key] = tuple(seq.tokens[: (index + 1) * 4]), not seq.request.cache_salt
            held = {node.key: seen[node.key] for node in pool.nodes()}
            assert tree.prefixes == {key: tokens for key, (tokens, is_shared) in held.items() if is_shared}
        core.check()
    assert tree.prefixes and any(not is_shared for _, is_shared in seen.values())


@contextmanager
def published(reads_ahead: bool = True, **given: Any) -> Iterator[tuple[KVPublisher, Any]]:
    """A publisher and a reader that it knows, whose side may take much before it is asked for."""
    config = KVEventsConfig(True, "zmq", ANY, **{"replay_endpoint": ANY, "topic": "kv@a", **given})
    with closing(KVPublisher(config, 3)) as publisher, zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.rcvtimeo = 5000
        reader.linger = 0
        if not reads_ahead:
            reader.rcvhwm, reader.rcvbuf = 2, 1 << 16
        reader.connect(publisher.endpoint)
        reader.subscribe(b"")
        for _ in range(500):  # until the subscription is there
            publisher.publish((TokenEvent(CLEARED),))
            if reader.poll(10):
                break
        while reader.poll(50):
            reader.recv_multipart()
        publisher.first = publisher._num  # type: ignore[attr-defined]
        yield publisher, reader


def test_events_have_vllms_form() -> None:
    with published() as (publisher, reader):
        publisher.publish(
            (STORE, STORE._replace(parent=b"\x09" * 16, adapter="ab"), TokenEvent(REMOVED, (b"\x01" * 16,)))
        )
        publisher.publish((TokenEvent(CLEARED),))
        topic, seq, payload = reader.recv_multipart()
        _, after, _ = reader.recv_multipart()
    assert topic == b"kv@a" and len(seq) == 8
    assert int.from_bytes(after, "big") == int.from_bytes(seq, "big") + 1
    when, events, rank = msgspec.msgpack.decode(payload)
    assert abs(when - time.time()) < 60 and rank == 3
    assert events[0] == {
        "type": "BlockStored", "block_hashes": [0x0101010101010101, 0x0202020202020202], "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    assert events[1]["parent_block_hash"] == 0x0909090909090909 and events[1]["lora_name"] == "ab"
    assert events[2] == {"type": "BlockRemoved", "block_hashes": [0x0101010101010101], "medium": "GPU"}
    tiers = (
        TokenEvent(STORED, (b"\x01" * 16,), None, (), 2, tier=HOST),
        TokenEvent(REMOVED, (b"\x01" * 16,), tier=DISK),
    )
    _, (stored, removed), _ = msgspec.msgpack.decode(encode_batch(1.0, tiers, 0))
    assert (stored["medium"], stored["token_ids"], removed["medium"]) == ("CPU", [], "STORAGE")


def told(*events: TierEvent) -> TierEvents:
    return TierEvents(0, events)


def test_blocks_in_tiers_are_told_if_their_tokens_were() -> None:
    """A snapshot tells what is new and what has gone; blocks of others and of salted requests are never told."""
    engine = Engine(EngineConfig(groups=full_groups(64), max_model_len=128, block_size=4))
    heard: list[TokenEvent] = []
    engine.core.state.tell_tokens(heard.extend)
    plain, salted = make_request("a", 13, 1), make_request("b", 13, 1, first=50, cache_salt="s")
    engine.add(plain, salted)
    engine.finish()
    log = engine.core.state.token_events
    assert log is not None
    (published,) = [event for event in heard if event.kind == STORED]
    keys = b"".join(map(bytes, published.blocks))
    other = b"".join(engine.core.state.blocks.pools[0].published()[nth][0] for nth in range(6))
    heard.clear()
    tiers = TierEventPublisher(log, 4, heard.extend)
    tiers.take(told(TierEvent(CLEARED), TierEvent(STORED, HOST, other + b"x" * 16)))
    assert heard == [TokenEvent(STORED, published.blocks, None, (), 4, tier=HOST)] and len(published.blocks) == 3
    heard.clear()
    tiers.take(told(TierEvent(STORED, HOST, keys), TierEvent(STORED, DISK, keys[:16])))
    assert heard == [TokenEvent(STORED, published.blocks[:1], None, (), 4, tier=DISK)], "said once"
    heard.clear()
    tiers.take(told(TierEvent(CLEARED), TierEvent(STORED, HOST, keys[:32])))
    assert heard == [
        TokenEvent(REMOVED, published.blocks[2:], tier=HOST),
        TokenEvent(REMOVED, published.blocks[:1], tier=DISK),
    ]
    heard.clear()
    tiers.take(told(TierEvent(REMOVED, HOST, other)))
    assert heard == [TokenEvent(REMOVED, published.blocks[:2], tier=HOST)]


def ask(address: str, *frames: bytes) -> list[list[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.linger = 0
        asker.connect(address)
        asker.send_multipart(frames)
        replies = []
        while asker.poll(5000 if len(frames) == 2 else 200):
            replies.append(asker.recv_multipart())
            if replies[-1][2] == b"\xff" * 8:
                break
        return replies


def test_what_is_kept_is_sent_again() -> None:
    with published(buffer_steps=3) as (publisher, reader):
        for number in range(5):
            publisher.publish((STORE._replace(tokens=(number,) * 4),))
            reader.recv_multipart()
        first = publisher.first  # type: ignore[attr-defined]
        *replies, end = ask(publisher.replay_endpoint, b"", (first + 1).to_bytes(8, "big"))
        assert end == [b"", b"", b"\xff" * 8, b""]
        assert [int.from_bytes(seq, "big") for _, _, seq, _ in replies] == [first + 2, first + 3, first + 4]
        assert decode_batch(replies[0][3])[1][0].tokens == (2,) * 4
        assert ask(publisher.replay_endpoint, b"what", b"is", b"this") == []
        assert len(ask(publisher.replay_endpoint, b"", (first + 4).to_bytes(8, "big"))) == 2


def test_what_comes_too_fast_is_dropped_and_leaves_a_gap() -> None:
    """The engine does not wait, and later messages show that some are missing."""
    with published(max_queue_size=4) as (publisher, reader):
        send, publisher._send = publisher._send, lambda: None  # type: ignore[method-assign]
        for _ in range(10):
            publisher.publish((STORE,))
        publisher._send = send  # type: ignore[method-assign]
        while publisher._waiting:
            publisher._wake()
            time.sleep(0.01)
        publisher.publish((STORE,))
        seqs = [int.from_bytes(reader.recv_multipart()[1], "big") for _ in range(5)]
    first = publisher.first  # type: ignore[attr-defined]
    assert publisher.num_dropped == 6 and seqs == [first, first + 1, first + 2, first + 3, first + 10]


def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    """Its messages are dropped beyond `hwm`."""
    event = STORE._replace(blocks=(b"\x01" * 16,) * 4000, tokens=(7,) * 8000)
    with published(reads_ahead=False, hwm=2) as (publisher, reader):
        began = time.monotonic()
        for _ in range(500):
            publisher.publish((event,))
        assert time.monotonic() - began < 30 and publisher.num_dropped == 0
        num = 0
        while reader.poll(300):
            reader.recv_multipart()
            num += 1
        assert num < 500


def test_a_port_that_is_taken_is_an_error() -> None:
    with published() as (publisher, _):
        taken = KVEventsConfig(True, endpoint=publisher.endpoint)
        with pytest.raises(ConfigError, match=r"--kv-events-config: tcp://127\.0\.0\.1:\d+ cannot be had: Address"):
            KVPublisher(taken)


def test_the_flag_takes_vllms_names() -> None:
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": null}'
    config = read_config(text)
    assert config == KVEventsConfig(True, endpoint="tcp://*:5557") and config.is_on
    assert KVEventsOptions(kv_events_config=config).config is config
    for off in ("{}", '{"enable_kv_cache_events": true, "publisher": "null"}'):
        assert KVEventsOptions(kv_events_config=read_config(off)).config is None
    launch = Launch("p", "m", "c", EngineOptions(), kv_events=config, rank=2)
    assert Launch.from_json(launch.to_json()) == launch


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "must be a JSON object"),
        ("{", "must be a JSON object"),
        ('{"endpoint": 5}', ": endpoint is not str"),
        ('{"endpoints": "x"}', "has no field 'endpoints'"),
        ('{"publisher": "nats"}', "has a publisher 'nats'"),
        ('{"endpoint": "127.0.0.1:5557"}', "has the address"),
        ('{"replay_endpoint": "tcp://127.0.0.1"}', "has the address"),
        ('{"endpoint": ""}', "has an empty endpoint"),
        ('{"buffer_steps": 0}', "has a count"),
    ],
)
def test_a_wrong_flag_is_told_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("[", r"\[")):
        read_config(text)


def test_events_stay_on_this_machine_unless_another_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_local(KVEventsConfig().endpoint) and is_local("tcp://[::1]:5") and is_local("ipc:///tmp/x")
    assert not is_local("tcp://*:5557") and not is_local("tcp://10.0.0.1:5557")
    assert listens("tcp://*:5557") and listens("tcp://localhost:1") and not listens("tcp://collector:5557")
    assert nth_endpoint("tcp://*:5557", 2) == "tcp://*:5559" and nth_endpoint(ANY, 2) == ANY
    assert nth_endpoint("ipc:///tmp/x", 0) == "ipc:///tmp/x" and nth_endpoint("ipc:///tmp/x", 1) == "ipc:///tmp/x_dp1"
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"--kv-events-config needs pyzmq: pip install 'tokenmill\[zmq\]'"):
        _ = KVEventsOptions(kv_events_config=KVEventsConfig(True)).config
