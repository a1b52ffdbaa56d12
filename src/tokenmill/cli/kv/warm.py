"""`kv warm`: computes the KV of documents, so that it is stored when requests bring them.

What is stored already is passed over, so that a run which was stopped goes on where it was. Documents are computed one
after the other, in the background of what the server does for others.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from ...core.errors import InvalidRequest
from .documents import Document, read_documents
from .server import Server, server_of

_IDLE_PRIORITY = 100
"""After requests that say nothing."""


def warm(args: argparse.Namespace) -> int:
    """Exit code 1: of some documents not all is stored."""
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
