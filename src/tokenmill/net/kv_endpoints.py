"""Where KV events are published and read: options with vLLM's names, addresses as ZeroMQ has them.

The command line reads it, so it imports no package.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..core.errors import ConfigError

PUBLISHERS = NULL, ZMQ = ("null", "zmq")
NO_ZMQ = "needs pyzmq: pip install 'tokenmill[zmq]'"


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """With vLLM's names.

    endpoint          where events are published: of this machine or with * it is listened at, others are connected to;
                      each further engine takes the next port, or the path with _dp and its number
    replay_endpoint   where those that are kept can be asked for; "": nowhere
    buffer_steps      messages that are kept
    hwm               messages that wait for one reader, and are dropped beyond
    max_queue_size    messages that wait to be sent
    topic             in front of each message
    """

    enable_kv_cache_events: bool = False
    publisher: str = ZMQ
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == ZMQ

    @property
    def addresses(self) -> list[str]:
        return [each for each in (self.endpoint, self.replay_endpoint) if each]


def import_zmq(option: str) -> Any:
    """The module. Raises ConfigError where it is not installed."""
    try:
        import zmq
    except ImportError:
        raise ConfigError(f"{option} {NO_ZMQ}.", param=option.removeprefix("--").replace("-", "_")) from None
    return zmq


def nth_endpoint(endpoint: str, rank: int) -> str:
    """Of the engine with this number: its port is that much higher, but for port 0; a path ends with the number."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp:"):
        return f"{endpoint}_dp{rank}"
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}" if int(port) else endpoint


def is_endpoint(text: str) -> bool:
    """tcp://HOST:PORT or ipc://PATH."""
    head, _, port = text.rpartition(":")
    if text.startswith("ipc://"):
        return len(text) > len("ipc://")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16
    return text.startswith("tcp://") and len(head) > len("tcp://") and is_port


def listens(endpoint: str) -> bool:
    """Whether it is an address of this machine, and not one of a reader that listens itself."""
    if not endpoint.startswith("tcp:"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host in ("*", "::", "0.0.0.0") or is_local(endpoint)


def is_local(endpoint: str) -> bool:
    """Whether only processes of this machine can reach it."""
    if not endpoint.startswith("tcp:"):
        return endpoint.startswith(("ipc:", "inproc:"))
    host = urlsplit(endpoint).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
