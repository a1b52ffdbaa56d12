"""Documents whose KV is meant, as bodies of the requests that will bring them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import ConfigError


class Document(NamedTuple):
    """body: of a request, with `prompt` or `messages`."""

    name: str
    body: dict[str, Any]


def read_documents(args: argparse.Namespace) -> Iterator[Document]:
    """One after the other. Raises ConfigError for a file that cannot be read."""
    if args.system is not None and args.form != "user":
        raise ConfigError("--system comes before a user's message: give --as user.", param="system")
    if args.documents and getattr(args, "kv_store", None) is not None:
        raise ConfigError("Documents are found by a server: give its --url instead of --kv-store.", param="kv_store")
    more = {"model": args.model, "cache_salt": args.cache_salt}
    more = {name: value for name, value in more.items() if value is not None}
    for name in args.documents:
        text = _read(name)
        if name.endswith(".jsonl"):
            for number, line in enumerate(text.splitlines(), 1):
                if line.strip():
                    yield Document(f"{name}:{number}", {**_body(line, f"{name}:{number}"), **more})
        elif text.strip():
            yield Document(name, {**_form(text, args), **more})
        else:
            raise ConfigError(f"{name} is empty.")


def read_pins(names: Iterable[str]) -> list[Document]:
    """System prompts: a text in each file, or the body of a request (.json). Raises ConfigError."""
    pins = []
    for name in names:
        text = _read(name)
        is_body = name.endswith(".json")
        body = _body(text, name) if is_body else {"messages": [{"role": "system", "content": text}]}
        pins.append(Document(name, body))
    return pins


def _form(text: str, args: argparse.Namespace) -> dict[str, Any]:
    """What follows the document in a message is not known, so that the message is not ended."""
    if args.form == "prompt":
        return {"prompt": text}
    before = [] if args.system is None else [{"role": "system", "content": args.system}]
    return {"messages": [*before, {"role": args.form, "content": text}], "add_generation_prompt": False}


def _body(line: str, where: str) -> dict[str, Any]:
    try:
        body = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}.") from None
    if isinstance(body, dict) and isinstance(body.get("body"), dict):  # a line of a batch
        body = body["body"]
    if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
        raise ConfigError(f"{where} is no request body: it needs either messages or prompt.")
    names = ("prompt", "messages", "tools", "model", "cache_salt", "add_generation_prompt", "chat_template_kwargs")
    return {name: body[name] for name in names if body.get(name) is not None}


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).expanduser().read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
