"""What the name of a model means. It touches no network, and reads nothing but its own table.

smollm2, qwen3:4b              one of tables/known_models.toml, by its name or another, such as Ollama's
qwen3:4b-q8_0                  the same in another quantisation that its repository has
org/name[@REVISION][:TAG]      a repository of the Hugging Face hub. TAG: a quantisation, or one of its .gguf files;
                               without one, what resolve_model (hub.py) chooses
hf.co/org/name:TAG             the same, as Ollama and web pages write it, with or without https://
https://huggingface.co/org/name/resolve/main/FILE.gguf      likewise, also with blob, raw or tree
https://HOST/PATH/FILE.gguf    a file of any other host
"""

from __future__ import annotations

import os
import re
import tomllib
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..core.units import format_bytes
from .gguf import split_parts
from .wheel import WheelModel

HUB_URL = "https://huggingface.co"
DEFAULT_QUANTIZATION = "Q4_K_M"
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_PART = r"[A-Za-z0-9][\w.-]*"
_HUB_NAME = re.compile(rf"({_PART}/{_PART})(?:@(\w[\w./-]*))?(?::(\w[\w./-]*))?", re.ASCII)
_PAGE = re.compile(rf"({_PART}/{_PART})/(?:resolve|blob|raw|tree)/([^/]+)(?:/(.+))?", re.ASCII)
_QUANTIZATION = r"(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|F16|F32|MXFP4\w*)"
_OF_FILE = re.compile(rf"(?:^|[-._/])({_QUANTIZATION})(?:-\d{{5}}-of-\d{{5}})?\.gguf", re.I)
_OF_TAG = re.compile(rf"(.+?)-({_QUANTIZATION}|fp16)", re.I)


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub. tag: a quantisation, a .gguf file, or None."""

    repository: str
    revision: str = "main"
    tag: str | None = None

    @property
    def folder(self) -> str:
        """Its name in the cache: of all tags, and of one revision."""
        at = "" if self.revision == "main" else f"@{urllib.parse.quote(self.revision, safe='')}"
        return self.repository.replace("/", "--", 1) + at


@dataclass(frozen=True, slots=True)
class UrlName:
    """A .gguf file of a web server. query: what follows the address and may be a secret; it is sent and never kept."""

    url: str
    query: str = ""

    @property
    def file(self) -> str:
        return urllib.parse.unquote(self.url.rpartition("/")[2])


@dataclass(frozen=True, slots=True)
class KnownModel:
    """An entry of tables/known_models.toml, which says what each field is. Either `wheel` or `hub` is given."""

    name: str
    task: str
    licence: str
    parameters: int
    size_bytes: int
    memory_bytes: int
    active: int = 0
    aliases: tuple[str, ...] = ()
    recommended: tuple[str, ...] = ()
    wheel: WheelModel | None = None
    hub: HubName | None = None

    @property
    def bytes_per_token(self) -> int:
        """What one stream reads of the weights for a token."""
        return self.size_bytes * self.active // self.parameters


@cache
def known_models() -> Mapping[str, KnownModel]:
    """By name, in the order of the table."""
    text = resources.files(__package__).joinpath("tables/known_models.toml").read_text(encoding="utf8")
    return {entry["name"]: _known(entry) for entry in tomllib.loads(text)["model"]}


def _known(entry: Mapping[str, Any]) -> KnownModel:
    wheel = entry.get("wheel")
    return KnownModel(
        name=entry["name"],
        task=entry["task"],
        licence=entry["licence"],
        parameters=entry["parameters"],
        active=entry.get("active", entry["parameters"]),
        size_bytes=round(entry["size_gb"] * 10**9),
        memory_bytes=round(entry["memory_gb"] * 10**9),
        aliases=tuple(entry.get("aliases", ())),
        recommended=tuple(entry.get("recommended", ())),
        wheel=None if wheel is None else WheelModel(**wheel),
        hub=None if wheel is not None else HubName(entry["repository"], tag=entry.get("quantization")),
    )


def find_known(name: str) -> KnownModel | None:
    """By its name or an alias, in any case of letters, with or without Ollama's ":latest"."""
    name = name.lower().removesuffix(":latest")
    models = known_models()
    return models.get(name) or next((each for each in models.values() if name in each.aliases), None)


def parse_name(name: str) -> KnownModel | HubName | UrlName | None:
    """A KnownModel where that is in a wheel; of all others, where they are. None: it means none of these, though it may
    be a path. Raises ConfigError for an address that no model can be had from."""
    known = find_known(name)
    if known is not None:
        return known.hub or known
    scheme, separator, rest = name.partition("://")
    if not separator:
        host, _, path = name.partition("/")
        return _of_hub(path, name) if host.lower() in _HUB_HOSTS else _short_name(name)
    if scheme.lower() == "hf":
        return _of_hub(rest, name)
    if scheme.lower() not in ("http", "https"):
        return None
    try:
        parts = urllib.parse.urlsplit(name)
    except ValueError as error:
        raise ConfigError(f"{name} is no address: {error}.", param="model") from None
    if parts.netloc.lower() in (*_HUB_HOSTS, urllib.parse.urlsplit(hub_endpoint()).netloc.lower()):
        return _of_hub(parts.path.strip("/"), name)
    if scheme.lower() != "https" or not parts.path.endswith(".gguf") or not parts.hostname or parts.username:
        raise ConfigError(
            f"{name} is no model's address: that begins with https://, has no password, and ends with .gguf. To talk "
            "with a server: tokenmill chat --url URL.",
            param="model",
        )
    found = UrlName(f"https://{parts.netloc}{parts.path}", parts.query)
    if "/" in found.file or not found.file.isprintable():
        raise ConfigError(f"{name} names no file: it may have neither a slash nor control characters.", param="model")
    return found


def hub_endpoint() -> str:
    """The hub, or the mirror that HF_ENDPOINT names."""
    return (os.environ.get("HF_ENDPOINT") or HUB_URL).rstrip("/")


def _short_name(name: str) -> HubName | None:
    tagged = _OF_TAG.fullmatch(name)
    known = None if tagged is None else find_known(tagged[1])
    if tagged is not None and known is not None and known.hub is not None and known.hub.tag:
        return HubName(known.hub.repository, tag="F16" if tagged[2].lower() == "fp16" else tagged[2].upper())
    match = _HUB_NAME.fullmatch(name)
    if match is None or match[1].endswith(".gguf"):
        return None
    return HubName(match[1], match[2] or "main", None if match[3] == "latest" else match[3])


def _of_hub(path: str, name: str) -> HubName:
    """Of what follows the hub's host."""
    found = _short_name(path) if "/" in path else None
    page = _PAGE.fullmatch(path)
    if page is not None:
        file = None if page[3] is None else urllib.parse.unquote(page[3])
        if file is None or file.endswith(".gguf"):
            found = HubName(page[1], urllib.parse.unquote(page[2]), file)
    if found is None:
        raise ConfigError(
            f"{name} is neither a repository of the hub nor one of its .gguf files: write org/name, org/name:Q4_K_M or "
            "the address of a .gguf file.",
            param="model",
        )
    return found


def quantization_of(file: str) -> str | None:
    """'org/Model-1B.Q4_K_M.gguf' -> 'Q4_K_M'."""
    match = _OF_FILE.search(file)
    return match[1].upper() if match and match.end() == len(file) else None


def gguf_models(files: Iterable[str]) -> list[str]:
    """Of a repository's files those of language models, sorted, each part of a split one."""
    return sorted(name for name in files if name.endswith(".gguf") and "mmproj" not in name)


def choose_gguf(files: list[str], tag: str | None) -> str | None:
    """Of a repository's files, the one that the tag means; without a tag, the only one or that of Q4_K_M."""
    files = gguf_models(files)
    if tag is not None and tag.endswith(".gguf"):
        return tag if tag in files else next((name for name in files if name.rpartition("/")[2] == tag), None)
    wanted = (tag or DEFAULT_QUANTIZATION).upper()
    chosen = next((name for name in files if quantization_of(name) == wanted), None)
    return files[0] if chosen is None and tag is None and len(files) == 1 else chosen


def _num_bits(file: str) -> int:
    """Of the quantisation that the file's name says: its first number."""
    found = re.search(r"\d+", quantization_of(file) or "")
    return 0 if found is None else int(found[0])


_HELD, _PROCESS_BYTES = 1.15, 4 * 10**8
"""Of a file's size what its weights take in memory, with the KV of a short conversation; and what the process takes."""


def choose_by_memory(sizes: Mapping[str, int], usable_bytes: int | None) -> tuple[str, str] | None:
    """Of a repository's files with their bytes, the one to run where no quantisation is named, and why it is not that
    of Q4_K_M: that one, or else the smallest of 4 bits or more; where it does not fit, the largest that does. None:
    there is no file with a quantisation in its name. usable_bytes: of memory; None: all fit."""
    models: list[tuple[int, str]] = []
    for name in gguf_models(sizes):
        parts = [part.as_posix() for part in split_parts(Path(name))]
        if name == parts[0] and quantization_of(name):
            models.append((sum(sizes.get(part, 0) for part in parts), name))
    models.sort()
    if not models:
        return None
    usual = [each for each in models if quantization_of(each[1]) == DEFAULT_QUANTIZATION]
    four_bits = [each for each in models if _num_bits(each[1]) >= 4]
    wanted, why = usual[0] if usual else (four_bits or models)[0], ""
    if not usual and len(models) > 1:
        why = f"the smallest of 4 bits or more, as there is no {DEFAULT_QUANTIZATION}" if four_bits else "the smallest"
    if usable_bytes is None or _HELD * wanted[0] + _PROCESS_BYTES <= usable_bytes:
        return wanted[1], why
    fitting = [each for each in models if _HELD * each[0] + _PROCESS_BYTES <= usable_bytes]
    what = f"{quantization_of(wanted[1])} of {format_bytes(wanted[0])}"
    there = f"the {format_bytes(usable_bytes)} of memory that are free"
    if fitting:
        return fitting[-1][1], f"the largest that fits: {what} does not fit {there}"
    return models[0][1], f"the smallest of all; none fits {there}"
