"""The flag that has engines publish KV events, and who publishes them then."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.options import check, option
from ..net.kv_endpoints import PUBLISHERS, KVEventsConfig, is_endpoint, is_local

if TYPE_CHECKING:
    from ..engine.core import EngineCore
    from ..kv.events.relay import TierEventRelay
    from ..net.kv_publisher import KVPublisher

_MOST = 1 << 24


def read_config(text: str) -> KVEventsConfig:
    """JSON with vLLM's names. Raises ValueError."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError('must be a JSON object such as {"enable_kv_cache_events": true}.')
    known = {each.name: type(each.default) for each in dataclasses.fields(KVEventsConfig)}
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"has no field {name!r}; there are {', '.join(known)}.")
        if value is not None and type(value) is not known[name]:
            raise ValueError(f"is not right: {name} is not {known[name].__name__}.")
    config = KVEventsConfig(**{name: value for name, value in fields.items() if value is not None})
    if config.publisher not in PUBLISHERS:
        raise ValueError(f"has a publisher {config.publisher!r}; there are {' and '.join(PUBLISHERS)}.")
    for address in config.addresses:
        if not is_endpoint(address):
            raise ValueError(f"has the address {address!r}; one is tcp://HOST:PORT or ipc://PATH.")
    if not config.endpoint:
        raise ValueError("has an empty endpoint.")
    if (
        not all(0 < each <= _MOST for each in (config.buffer_steps, config.max_queue_size))
        or not 0 <= config.hwm <= _MOST
    ):
        raise ValueError(f"has a count that is not between 1 and {_MOST}.")
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsOptions:
    """Whether engines publish what their caches hold. Raises ConfigError."""

    kv_events_config: KVEventsConfig | None = option(  # noqa: RUF009
        None,
        "have engines publish over ZeroMQ which blocks they cache, as vLLM does: JSON with enable_kv_cache_events, "
        "publisher (zmq, null), endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic. Events show the "
        "token ids of prompts and answers to all who can reach the endpoint: it is tcp://127.0.0.1:5557 unless another "
        "is named (default: nothing is published)",
        read=read_config,
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def config(self) -> KVEventsConfig | None:
        """None: nothing is published. Raises ConfigError where pyzmq is not installed."""
        from ..net.kv_endpoints import import_zmq

        config = self.kv_events_config
        if config is None or not config.is_on:
            return None
        import_zmq("--kv-events-config")
        return config


@contextmanager
def publishing(config: KVEventsConfig | None, rank: int = 0) -> Iterator[KVPublisher | None]:
    """Who publishes what the engine with this number among its front end's caches; None: nobody. Raises ConfigError."""
    from ..net.kv_publisher import KVPublisher

    if config is None:
        yield None
        return
    publisher = KVPublisher(config, rank)
    try:
        yield publisher
    finally:
        publisher.close()


def tell(core: EngineCore, publisher: KVPublisher | None) -> None:
    """From now on."""
    if publisher is not None:
        core.state.tell_tokens(publisher.publish)


def publish_tiers(core: EngineCore, publisher: KVPublisher | None, relay: TierEventRelay) -> None:
    """Of the engine's KV store, too; once the store has been joined."""
    from ..kv.events.publisher import TierEventPublisher

    if publisher is not None and core.state.token_events is not None:
        relay.publish(TierEventPublisher(core.state.token_events, core.config.block_size, publisher.publish))


def published_facts(publisher: KVPublisher | None) -> tuple[tuple[str, str], ...]:
    """Where events are published, for the printed plan."""
    if publisher is None:
        return ()
    where = publisher.endpoint
    if publisher.replay_endpoint:
        where += f", again at {publisher.replay_endpoint}"
    if not is_local(publisher.endpoint):
        where += ": whoever reaches it sees the tokens of prompts and answers"
    return (("KV events", where),)
