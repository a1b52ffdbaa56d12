"""The addresses of remote stores, and what is at each.

    redis://[USER[:PASSWORD]@]HOST[:PORT][/DB]  rediss://...  unix:///PATH     Redis, Valkey (`redis`)
    s3://BUCKET[/PREFIX]  file:///FOLDER                                      objects, files (`objects`)
    mooncake://MASTER[:PORT]                                                  Mooncake Store (`mooncake`)

Options follow the address as ?NAME=VALUE&...; those of every kind are in OPTIONS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ....core.errors import ConfigError

PARAM = "kv_remote"
_MOST_DIGITS = 9
OPTIONS = ("epoch",)
"""epoch: the fencing epoch, where the operator gives one."""


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
