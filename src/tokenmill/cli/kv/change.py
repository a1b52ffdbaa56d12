"""`kv verify`, `kv rm`, `kv fence`: whether what a KV store has is sound, what goes, and who may write."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import closing
from typing import Any

from ...core.errors import ConfigError
from ..kv_admin import StoreAdmin
from .documents import read_documents
from .server import server_of, socket_of


def verify(args: argparse.Namespace) -> int:
    """Exit code 1: blocks were not what had been saved; they are dropped."""
    damaged = asyncio.run(_answer_of(socket_of(args), "verify", {}))["damaged"]
    for tier, num_bad in damaged.items():
        print(f"{tier}: " + (f"{num_bad} blocks were damaged, and are dropped" if num_bad else "all blocks are sound"))
    if not damaged:
        print("no tier keeps bytes of its own on this machine")
    return 1 if any(damaged.values()) else 0


def fence(args: argparse.Namespace) -> int:
    told = asyncio.run(_answer_of(socket_of(args), "fence", {}))
    print(f"epoch {told['epoch']}: no other machine writes to the remote store until it is started again")
    return 0


def rm(args: argparse.Namespace) -> int:
    is_part = args.tier is not None or args.owner is not None
    if bool(args.documents) + is_part + args.all != 1:
        raise ConfigError("Say what is to be forgotten: DOCUMENT..., --tier, --owner, or --all.")
    if args.documents:
        server = server_of(args)
        for document in read_documents(args):
            found = server.ask("/admin/kv/find", document.body)
            server.ask("/admin/kv/drop", document.body)
            num_blocks, num_stored = found["num_blocks"], found["num_stored"]
            print(f"{document.name}: {num_stored} of {num_blocks} blocks were stored, and are forgotten")
        return 0
    given = {"tier": args.tier, "owner": args.owner}
    asked = {name: value for name, value in given.items() if value is not None}
    told = asyncio.run(_answer_of(socket_of(args), "clear", asked))
    print(f"{told['blocks']} blocks are forgotten")
    return 0


async def _answer_of(path: str, what: str, argument: dict[str, Any]) -> Any:
    with closing(StoreAdmin(path)) as admin:
        return await admin.ask(what, argument)
