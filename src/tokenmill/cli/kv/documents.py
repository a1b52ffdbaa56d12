"""Documents whose KV is meant, as bodies of the requests that will bring them; and `kv warm`, which computes their KV
before that."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import ConfigError, InvalidRequest
from .server import Server, server_of


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


_IDLE_PRIORITY = 100
"""After requests that say nothing."""


def warm(args: argparse.Namespace) -> int:
    """Compute the KV of documents, so that it is stored when requests bring them: one after the other, in the
    background of what the server does for others. What is stored already is passed over, so that a run which was
    stopped goes on where it was. Exit code 1: of some documents not all is stored."""
    server = server_of(args)
    num_done = num_known = num_failed = num_tokens = 0
    began_s = time.monotonic()
    for document in read_documents(args):
        try:
            said, is_known, is_whole = _warm(server, document, args)
        except InvalidRequest as error:
            said, is_known, is_whole = {"num_tokens": 0}, False, False
            print(f"{document.name}: {error.message}", file=sys.stderr)
        num_done, num_known, num_failed = num_done + 1, num_known + is_known, num_failed + (not is_whole)
        num_tokens += 0 if is_known else said["num_tokens"]
        if not args.quiet:
            state = "stored already" if is_known else "stored" if is_whole else "NOT stored whole"
            print(f"{document.name}: {said['num_tokens']} tokens, {_where(said)}{state}", flush=True)
    took_s = time.monotonic() - began_s
    rate = f", {num_tokens / took_s:.0f} tokens/s" if num_tokens else ""
    print(f"{num_done} documents, {num_known} stored already; {num_tokens} tokens computed in {took_s:.1f} s{rate}")
    return 1 if num_failed else 0


def _warm(server: Server, document: Document, args: argparse.Namespace) -> tuple[dict[str, Any], bool, bool]:
    """(what is stored of it, whether it was before, whether it is whole)"""
    found = server.ask("/admin/kv/find", document.body)
    is_known = found["num_stored"] == found["num_blocks"] and not args.again
    if not is_known:
        _compute(server, document)
        found = server.ask("/admin/kv/find", document.body)
    if args.pin:
        found = server.ask("/admin/kv/pin", document.body)
    return found, is_known, found["num_stored"] == found["num_blocks"]


def _compute(server: Server, document: Document) -> None:
    """It is handed over as from a prefill server: the answer comes when the KV is as far down as it goes."""
    path = "/v1/chat/completions" if "messages" in document.body else "/v1/completions"
    once = {"max_tokens": 1, "temperature": 0, "priority": _IDLE_PRIORITY}
    server.ask(path, {**document.body, **once, "kv_transfer_params": {"do_remote_decode": True}})


def _where(said: dict[str, Any]) -> str:
    tiers = ", ".join(f"{count} in {tier}" for tier, count in said.get("tiers", {}).items())
    return f"{said['num_blocks']} blocks ({tiers}): " if tiers else ""
