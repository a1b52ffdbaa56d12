"""What is asked of a store that others have a hand in: values by name. And its address:

    redis://[USER[:PASSWORD]@]HOST[:PORT][/DB]  rediss://...  unix:///PATH     Redis, Valkey (`redis`)
    s3://BUCKET[/PREFIX]  file:///FOLDER                                      objects, files (`objects`)
    mooncake://MASTER[:PORT]                                                  Mooncake Store (`mooncake`)
    NAME://...                                                               of a plug-in (`plugin_backend`)

Options follow the address as ?NAME=VALUE&...; those of every kind are in OPTIONS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ....core.errors import ConfigError

PARAM = "kv_remote"
_MOST_DIGITS = 9
OPTIONS = ("epoch",)
"""epoch: the fencing epoch, where the operator gives one."""
Buffer = bytes | bytearray | memoryview


class Backend(Protocol):
    """Calls are made on several threads at once; they raise OSError and EOFError, TimeoutError among them: each has a
    limit in seconds.

    name         as the log has it: without credentials
    num_threads  that are worth having, for calls of each kind
    batch_bytes  of values are asked for in one call, or one value
    look_names   are asked for in one call
    look_s       `has` takes at most so long, or the store is of no use
    """

    name: str
    num_threads: int
    batch_bytes: int
    look_names: int
    look_s: float

    def check(self, limit_s: float) -> None:
        """Whether it answers, and lets us in."""
        ...

    def has(self, names: Sequence[str], limit_s: float) -> list[bool]:
        """Of one prefix, in its order: what lies between two that are there may be taken to be there."""
        ...

    def get(
        self, names: Sequence[str], most_bytes: int, take: Callable[[int, memoryview], None], limit_s: float
    ) -> None:
        """`take(nth, value)` for each that is there; of one that has more bytes than that, whatever has another length.
        What it gets is valid during the call."""
        ...

    def put(self, values: Sequence[tuple[str, Buffer]], limit_s: float) -> list[bool]:
        """Which were taken: a store that is full takes none."""
        ...

    def delete(self, names: Sequence[str], limit_s: float) -> None: ...

    def close(self) -> None:
        """Calls may still run meanwhile; not those of a plug-in, which is closed after its last call has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL. name: without credentials and options."""

    url: SplitResult = field(repr=False)
    options: Mapping[str, str] = field(repr=False)
    name: str

    def number(self, option: str, default: int) -> int:
        """Raises ConfigError."""
        text = self.options.get(option)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
            raise ConfigError(f"--kv-remote: {option}={text} is no number.", param=PARAM)
        return int(text)

    def secret(self, option: str) -> str:
        """What the file says that the option names, "" without one. Raises ConfigError."""
        path = self.options.get(option)
        if path is None:
            return ""
        try:
            return Path(path).read_text(encoding="utf8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--kv-remote: {option} {path} cannot be read.", param=PARAM) from error


def parse(text: str, known: Sequence[str]) -> Address:
    """known: the options that there are. Raises ConfigError."""
    try:
        url = urlsplit(text)
        host, port = url.hostname or "", url.port
        options = dict(parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)))
    except ValueError as error:
        raise ConfigError("--kv-remote: this address cannot be read.", param=PARAM) from error
    for option in options:
        if option not in known:
            raise ConfigError(f"--kv-remote: unknown option {option}; there are: {', '.join(known)}", param=PARAM)
    where = f"{url.scheme}://" + (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "") + url.path
    return Address(url, options, where)
