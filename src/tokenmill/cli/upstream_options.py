"""Flags of `serve` about models beside its own: of this machine, of other servers, and names for versions of them."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..cluster.canary import Version
from ..cluster.on_demand import Rules
from ..core.errors import ConfigError, InvalidRequest
from ..core.options import check, option, options_of, seconds
from ..net.kv_endpoints import is_endpoint

if TYPE_CHECKING:
    from ..control.models.canaries import Canaries
    from ..core.ports import Clock
    from ..sandbox.parent import SandboxProcess
    from ..server.upstream.prefixes import Prefixes
    from ..server.upstream.upstream import Upstream
    from ..text.text_model import TextModel
    from .model_folder import ModelFolder

UPSTREAMS = "more models"
"""The heading in the help of `serve`."""


def _named_url(text: str) -> tuple[str, str]:
    from ..server.upstream.connection import UpstreamAddress

    name, equals, url = text.partition("=")
    if not (name and equals and url and name.isprintable()):
        raise ValueError(f"must be NAME=URL, got {text!r}.")
    UpstreamAddress.of(url)
    return name, url


def _named_model(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not (name and model and name.isprintable()):
        raise ValueError(f"must be NAME=MODEL, got {text!r}.")
    return name, model


def _seconds_or_never(text: str) -> float:
    return -1.0 if text.strip() == "-1" else seconds(text)


def _canary(text: str) -> tuple[str, tuple[Version, ...]]:
    name, _, rest = text.partition("=")
    versions = []
    for part in rest.split(","):
        weight, _, model = part.partition(":")
        try:
            versions.append(Version(model, float(weight)))
        except ValueError:
            model = ""
        if not (name and model and 0 <= versions[-1].weight < math.inf):
            raise ValueError(f"must be NAME=WEIGHT:MODEL,WEIGHT:MODEL, got {text!r}.")
    return name, tuple(versions)


@dataclass(frozen=True, slots=True)
class FeedAddress:
    """Where an upstream of the model `name` publishes KV events; replay: "": they cannot be had again."""

    name: str
    endpoint: str
    replay: str = ""


def _named_feed(text: str) -> FeedAddress:
    name, _, rest = text.partition("=")
    endpoint, comma, more = rest.partition(",")
    key, _, replay = more.partition("=")
    addresses = (endpoint, replay) if comma else (endpoint,)
    is_right = name and name.isprintable() and (key == "replay" if comma else True)
    if not is_right or not all(is_endpoint(each) for each in addresses):
        raise ValueError(f"must be NAME=tcp://HOST:PORT[,replay=tcp://HOST:PORT], got {text!r}.")
    return FeedAddress(name, endpoint, replay)


_OF_FOLDER = ("models_max", "models_autoload", "models_wait_s", "sleep_idle_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamOptions:
    """Which servers answer for which models. Raises ConfigError."""

    add_model: tuple[tuple[str, str], ...] = option(
        (),
        "serve another model of this machine too, under NAME, with engines of its own (repeatable)",
        several="each",
        read=_named_model,
        metavar="NAME=MODEL",
    )
    models_dir: str | None = option(
        None,
        "load models of this folder when a call names them: .gguf files, and folders that hold one model. Without "
        "MODEL, the first of them answers calls that name none",
        metavar="DIR",
    )
    models_max: int = option(
        4, "models of --models-dir in memory at once; 0: as many as it holds (default: 4)", least=0, metavar="N"
    )
    models_autoload: bool = option(
        True, "have calls load models of --models-dir; else POST /models/load does (default: on)", has_no=True
    )
    models_wait_s: float = option(
        300.0, "a call waits so long for a model to be loaded, then 503 (default: 300)", read=seconds, metavar="S"
    )
    sleep_idle_seconds: float = option(
        -1.0,
        "unload a model of --models-dir that has had no call for so long; no call can ask for more by keep_alive "
        "(default: -1, only when its memory is needed)",
        read=_seconds_or_never,
        metavar="S",
    )
    upstream: tuple[tuple[str, str], ...] = option(
        (),
        "calls for the model NAME are passed to the OpenAI-compatible server at URL; several of one name share them "
        "(repeatable)",
        several="each",
        read=_named_url,
        metavar="NAME=URL",
    )
    upstream_api_key_file: str | None = option(
        None,
        "keys that upstreams want, NAME=KEY a line, in a file that only its owner may read (default: none are sent)",
        metavar="FILE",
    )
    upstream_timeout_s: float = option(
        300.0,
        "longest silence of an upstream's answer, its first byte included (default: 300)",
        read=seconds,
        metavar="S",
    )
    upstream_max_open: int = option(
        256, "most calls that one upstream has at once; more are refused (default: 256)", least=1, metavar="N"
    )
    upstream_kv_events: tuple[FeedAddress, ...] = option(
        (),
        "where an upstream of NAME publishes KV events as vLLM does, the first for the first --upstream NAME and so on:"
        " calls go where much of their prompt is cached and few are open; needs --upstream-tokenizer (repeatable)",
        several="each",
        read=_named_feed,
        metavar="NAME=ADDRESS[,replay=ADDRESS]",
    )
    upstream_tokenizer: tuple[tuple[str, str], ...] = option(
        (),
        "the model, of which tokenizer and chat template are used here, that upstreams of NAME serve (repeatable)",
        several="each",
        read=_named_model,
        metavar="NAME=MODEL",
    )

    canary: tuple[tuple[str, tuple[Version, ...]], ...] = option(
        (),
        "NAME stands for versions of a model with weights, such as chat=95:old,5:new; the first is the stable one, and "
        "one that is found worse is taken back (repeatable)",
        several="each",
        read=_canary,
        metavar="NAME=WEIGHT:MODEL,WEIGHT:MODEL",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.upstream_timeout_s <= 0:
            raise ConfigError("--upstream-timeout-s must be more than 0.", param="upstream_timeout_s")
        if len(set(self.upstream)) != len(self.upstream):
            raise ConfigError("--upstream names the same server twice.", param="upstream")
        if self.models_dir is None:
            usual = {name: default for name, (_, default, _) in options_of(UpstreamOptions).items()}
            for name in _OF_FOLDER:
                if getattr(self, name) != usual[name]:
                    raise ConfigError(
                        f"--{name.replace('_', '-')} needs --models-dir DIR: a model that is named stays loaded.",
                        param=name,
                    )
        if self.upstream_api_key_file is not None and not self.upstream:
            raise ConfigError("--upstream-api-key-file needs --upstream.", param="upstream_api_key_file")
        self._check_feeds()

    def _check_feeds(self) -> None:
        names = [name for name, _ in self.upstream]
        fed = [feed.name for feed in self.upstream_kv_events]
        read = [name for name, _ in self.upstream_tokenizer]
        for name in dict.fromkeys(fed):
            if fed.count(name) != names.count(name):
                raise ConfigError(
                    f"--upstream-kv-events {name} is given {fed.count(name)} times and --upstream {name} "
                    f"{names.count(name)} times; each upstream of a name needs one.",
                    param="upstream_kv_events",
                )
            if name not in read:
                raise ConfigError(
                    f"--upstream-kv-events {name} needs --upstream-tokenizer {name}=MODEL: events tell of tokens.",
                    param="upstream_kv_events",
                )
        for name in read:
            if name not in fed or read.count(name) > 1:
                why = "is given twice" if name in fed else f"needs --upstream-kv-events {name}=ADDRESS"
                raise ConfigError(f"--upstream-tokenizer {name} {why}.", param="upstream_tokenizer")

    def prefixes(self) -> dict[str, Prefixes]:
        """What upstreams tell of their caches, by the model's name. Needs a running loop. Raises ConfigError and
        BadCheckpoint."""
        from ..net.kv_subscriber import KVSubscriber
        from ..server.upstream.prefixes import Prefixes

        made: dict[str, Prefixes] = {}
        for name, model in self.upstream_tokenizer:
            feeds = [KVSubscriber(each.endpoint, each.replay) for each in self.upstream_kv_events if each.name == name]
            text, sandbox = _text_of(model)
            made[name] = Prefixes(text, sandbox, feeds, sandbox.warm_up, sandbox.close)
        return made

    def upstreams(self, taken: Sequence[str], clock: Clock) -> list[Upstream]:
        """taken: names that other models have. Raises ConfigError."""
        from ..server.upstream.connection import UpstreamAddress
        from ..server.upstream.upstream import Upstream

        for name, _ in self.upstream:
            if name in taken:
                raise ConfigError(f"--upstream: {name} is the name of another model here.", param="upstream")
        named = [name for name, _ in self.add_model]
        others = {*taken, *(name for name, _ in self.upstream)}
        if len(set(named)) != len(named) or not others.isdisjoint(named):
            raise ConfigError("--add-model needs names of their own, each different.", param="add_model")
        keys = self._keys()
        return [
            Upstream(name, UpstreamAddress.of(url), clock, key=keys.get(name, ""), timeout_s=self.upstream_timeout_s)
            for name, url in self.upstream
        ]

    def folder(self) -> ModelFolder | None:
        """Of --models-dir. Raises ConfigError."""
        if self.models_dir is None:
            return None
        if not os.path.isdir(self.models_dir):
            raise ConfigError(f"--models-dir {self.models_dir} is not a folder.", param="models_dir")
        from .model_folder import ModelFolder

        return ModelFolder(self.models_dir)

    @property
    def on_demand(self) -> Rules:
        """Of models of --models-dir."""
        idle_s = math.inf if self.sleep_idle_seconds < 0 else self.sleep_idle_seconds
        return Rules(self.models_max, idle_s, max_wait_s=self.models_wait_s, autoload=self.models_autoload)

    @property
    def beside(self) -> set[str]:
        """Names of models and canaries that are there some time after the server's own model."""
        return {name for name, _ in (*self.add_model, *self.canary)}

    def put_canaries(self, canaries: Canaries) -> None:
        """Raises ConfigError."""
        for name, versions in self.canary:
            try:
                canaries.put(name, versions)
            except InvalidRequest as error:
                raise ConfigError(f"--canary {name}: {error.message}", param="canary") from None

    def _keys(self) -> dict[str, str]:
        path = self.upstream_api_key_file
        if path is None:
            return {}
        where = f"--upstream-api-key-file {path}"
        try:
            with Path(path).open(encoding="utf8") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                lines = file.read().splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where} cannot be read: {error}.", param="upstream_api_key_file") from error
        if mode & 0o077:
            raise ConfigError(
                f"{where} can be read by others than its owner (mode {mode:04o}): chmod 600 it.",
                param="upstream_api_key_file",
            )
        names = {name for name, _ in self.upstream}
        keys = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, _, key = line.strip().partition("=")
            if name not in names or not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"{where}: line {number} is not NAME=KEY with the name of an --upstream.",
                    param="upstream_api_key_file",
                )
            keys[name] = key
        return keys


def _text_of(model: str) -> tuple[TextModel, SandboxProcess]:
    """Its tokenizer and template, and what renders with these."""
    from ..formats.checkpoint import open_text
    from ..node.options import TextOptions
    from ..node.text import load_text_model
    from ..sandbox.parent import SandboxProcess, materials
    from .models import resolve_model

    found = resolve_model(model)
    checkpoint = open_text(found.path)
    try:
        text, _ = load_text_model(checkpoint, TextOptions())
    finally:
        checkpoint.close()
    return text, SandboxProcess(str(found.path), materials(text))
