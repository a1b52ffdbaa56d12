"""`show`: what a model is and can do, as Ollama's users look for it. `inspect` says what it takes here, and the rest.

It is read from the model's own files; nothing is fetched, and no weights are loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ..api.ollama.shape import capabilities
from ..api.port import Described
from ..core.errors import ConfigError
from ..core.units import format_bytes, visible
from ..formats.checkpoint import Checkpoint, open_text
from ..formats.hub import local_model, size_on_disk
from ..models.summary import shape_of
from ..node.load import choose_pooling
from ..node.options import TextOptions
from ..node.text import load_text_model
from ..text.text_model import TextModel

_LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING")
_CARD_LICENSE = re.compile(r"^license(?:_name)?: *['\"]?([^'\"\n]+)", re.MULTILINE)


def show(args: argparse.Namespace) -> int:
    checkpoint = open_text(local_model(args.model))
    try:
        text, _ = load_text_model(checkpoint, TextOptions())
        if args.license:
            _print(_license_text(checkpoint.path) or _need(_license(checkpoint), "license"))
        elif args.template:
            _print(_need("" if text.chat is None else text.chat.source, "chat template"))
        elif args.parameters:
            _print(_need("\n".join(_parameters(text)), "sampling parameters of its own"))
        else:
            for title, lines in _sections(args.model, checkpoint, text):
                _print(f"{title}\n" + "\n".join(f"  {line}" for line in lines) + "\n")
    finally:
        checkpoint.close()
    return 0


def _print(text: str) -> None:
    """A file of others may hold what a terminal would obey."""
    print(visible(text) if sys.stdout.isatty() else text)


def _sections(name: str, checkpoint: Checkpoint, text: TextModel) -> Iterator[tuple[str, list[str]]]:
    about, max_context = text.info, shape_of(checkpoint).max_context
    told = Described.of(text, max_context, gives_vectors=choose_pooling(checkpoint, "auto", None) is not None)
    facts = {
        "name": name,
        "architecture": about.architecture,
        "parameters": about.parameter_size,
        "quantization": about.quantization,
        "file size": format_bytes(size_on_disk(checkpoint.path)),
        "context length": f"{max_context:,}",
        "embedding length": f"{about.width:,}" if about.width else "",
        "template": "" if text.chat is None else f"{len(text.chat.source):,} characters (--template shows it)",
        "file": str(checkpoint.path),
    }
    yield "Model", [f"{fact:<18} {value}" for fact, value in facts.items() if value]
    yield "Capabilities", capabilities(told)
    if parameters := list(_parameters(text)):
        yield "Parameters", parameters
    if license := _license(checkpoint):
        yield "License", [license]


def _parameters(text: TextModel) -> Iterator[str]:
    """Of requests that name none."""
    return (f"{name:<18} {value}" for name, value in text.sampling_defaults.items())


def _license(checkpoint: Checkpoint) -> str:
    """As the file, or the card beside it, names it; "": neither does."""
    if named := checkpoint.metadata.get("general.license"):
        return str(named)
    card = _read(checkpoint.path / "README.md")
    found = _CARD_LICENSE.search(card.split("\n---", 1)[0]) if card.startswith("---") else None
    return found[1].strip() if found else ""


def _license_text(path: Path) -> str:
    """In a folder of its own; beside a file may be another's."""
    return next((text for name in _LICENSES if path.is_dir() and (text := _read(path / name))), "")


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf8", errors="replace")
    return ""


def _need(text: str, what: str) -> str:
    if not text:
        raise ConfigError(f"The model's files tell no {what}.")
    return text
