"""The file of --expert-load: what each expert of each layer computed. Written while a server serves, drawn by
`tokenmill inspect --expert-load FILE`, and the input of whatever places experts.

    {"kind": "tokenmill expert load", "version": 1, "model": ..., "numerics_id": ...,
     "since": "2026-01-01T00:00:00Z", "until": ..., "num_experts": 64,
     "layers": [1, 2, ...], "tokens": [[of each expert of layer 1], ...]}
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import ConfigError
from ..core.experts import ExpertLoad, balancedness, num_unused
from ..formats.digest import write_atomically

if TYPE_CHECKING:
    from ..core.events import Ready
    from ..server.client import EngineClient

log = logging.getLogger(__name__)

KIND, VERSION = "tokenmill expert load", 1
WRITE_S = 10.0
LAST_WAIT_S = 1.5
"""What engines counted lately is waited for so long before the file is written for the last time."""


class LoadFile(NamedTuple):
    """A file's content. since, until: as they are written there."""

    model: str
    numerics_id: str
    since: str
    until: str
    load: ExpertLoad


def write_load(path: Path, model: str, numerics_id: str, since_s: float, load: ExpertLoad) -> None:
    """Replaces the file at once. since_s: Unix time. Raises OSError."""
    body = {
        "kind": KIND,
        "version": VERSION,
        "model": model,
        "numerics_id": numerics_id,
        "since": _stamp(since_s),
        "until": _stamp(time.time()),
        "num_experts": len(load.tokens[0]),
        "layers": load.layers,
        "tokens": load.tokens,
    }
    write_atomically(path, json.dumps(body) + "\n")


def read_load(path: Path) -> LoadFile:
    """Raises ConfigError for what is no such file."""
    try:
        return _read(json.loads(path.read_text(encoding="utf8")))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", param="expert_load") from error
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ConfigError(f"{path} is not a file of --expert-load: {error}.", param="expert_load") from error


def _read(body: Any) -> LoadFile:
    if not isinstance(body, dict) or body.get("kind") != KIND:
        raise ValueError(f"its kind is not {KIND!r}")
    if body["version"] != VERSION:
        raise ValueError(f"its version is {body['version']!r}, not {VERSION}")
    counts = [body["num_experts"], *body["layers"], *(each for row in body["tokens"] for each in row)]
    if not all(type(each) is int and 0 <= each < 2**63 for each in counts):
        raise ValueError("a count in it is no whole number of at least 0")
    load = ExpertLoad(tuple(body["layers"]), tuple(map(tuple, body["tokens"])))
    if not load.layers or {len(each) for each in load.tokens} != {body["num_experts"]} or not body["num_experts"]:
        raise ValueError("its layers do not have the experts it names")
    model, numerics_id, since, until = (str(body[name]) for name in ("model", "numerics_id", "since", "until"))
    return LoadFile(model, numerics_id, since, until, load)


def _stamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class LoadWriter:
    """Writes what a client's engines counted, since now. path: None: nothing is written. Raises ConfigError where the
    file cannot be written at all."""

    def __init__(
        self, path: str | None, model: str, client: EngineClient, now: Callable[[], float] = time.time
    ) -> None:
        self._path = None if path is None else Path(path).expanduser().absolute()
        self._model = model
        self._client = client
        self._since_s = now()
        self._numerics_id = ""
        self._last: ExpertLoad | None = None
        if self._path is not None and not self._path.parent.is_dir():
            raise ConfigError(f"--expert-load {path}: there is no folder {self._path.parent}.", param="expert_load")

    def check(self, ready: Ready) -> None:
        """Raises ConfigError where there is nothing to write of engines like this one."""
        if self._path is not None and ready.expert_load is None:
            raise ConfigError(
                f"--expert-load is about mixtures of experts; {ready.model} is none.", param="expert_load"
            )

    async def run(self) -> None:
        """For ever: every ten seconds, where there is something new."""
        while True:
            await asyncio.sleep(WRITE_S)
            self.write()

    async def finish(self) -> None:
        """For the last time, as long as the engines are there."""
        if self._path is None:
            return
        experts, ends_s = self._client.observers.experts, time.monotonic() + LAST_WAIT_S
        while time.monotonic() < ends_s and experts.load is not None:
            if experts.load.num_steps >= self._client.stats.num_steps:
                break
            await asyncio.sleep(0.05)
        self.write()

    def write(self) -> None:
        """What cannot be written is logged."""
        load, ready = self._client.observers.experts.load, self._client.ready
        self._numerics_id = self._numerics_id if ready is None else ready.numerics_id
        if self._path is None or load is None or load == self._last:
            return
        try:
            write_load(self._path, self._model, self._numerics_id, self._since_s, load)
        except OSError as error:
            log.error("The file of --expert-load cannot be written: %s", error)
        else:
            self._last = load


WIDTH = 64
_LEVELS = " ▁▂▃▄▅▆▇█"
_FULL = 2.0
"""Times the mean, from which on a character is full."""
_NUM_BEST = 3


def draw_load(file: LoadFile) -> Iterator[str]:
    """Which experts did the work, as a map for the terminal: a line for each layer, a character for each expert, or for
    a few neighbours where there are more than fit.

        layer  1  ▂▂▄▁▂  ▂█▂  even 0.41  unused   2  most 9 (14%), 4 (7%), 0 (5%)
    """
    load = file.load
    num_experts = len(load.tokens[0])
    total = sum(map(sum, load.tokens))
    group = -(-num_experts // WIDTH)
    yield f"{'model':<14} {file.model}"
    yield f"{'numerics id':<14} {file.numerics_id}"
    yield f"{'counted':<14} {file.since} to {file.until}"
    yield f"{'experts':<14} {num_experts} in each of {len(load.layers)} layers"
    yield f"{'computed':<14} {total:,} rows times experts"
    evens = [balancedness(tokens) for tokens in load.tokens]
    worst = min(range(len(evens)), key=evens.__getitem__)
    mean = sum(evens) / len(evens)
    yield f"{'even':<14} {mean:.2f} on average; least {evens[worst]:.2f}, in layer {load.layers[worst]}"
    yield ""
    each = "an expert" if group == 1 else f"{group} experts"
    yield f"Each character is {each}: empty for no row at all, full for {_FULL:g} times the mean or more."
    for layer, tokens, even in zip(load.layers, load.tokens, evens, strict=True):
        best = sorted(range(num_experts), key=lambda expert: (-tokens[expert], expert))[:_NUM_BEST]
        whole = sum(tokens)
        shown = ", ".join(f"{expert} ({tokens[expert] / whole:.0%})" for expert in best if tokens[expert])
        yield (
            f"layer {layer:>3}  {_bars(tokens, group)}  even {even:.2f}  unused {num_unused(tokens):>3}"
            f"  most {shown or 'none'}"
        )


def _bars(tokens: Sequence[int], group: int) -> str:
    """Of neighbours, by their mean."""
    mean = sum(tokens) / len(tokens)
    parts = [tokens[first : first + group] for first in range(0, len(tokens), group)]
    return "".join(_bar(sum(part) / len(part), mean) for part in parts)


def _bar(value: float, mean: float) -> str:
    """Anything above nothing is shown."""
    if not value:
        return _LEVELS[0]
    top = len(_LEVELS) - 1
    return _LEVELS[max(1, min(top, round(top * value / (_FULL * mean))))]
