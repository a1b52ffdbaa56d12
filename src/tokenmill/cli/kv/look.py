"""What a KV store has (`kv stat`, `kv ls`), whether it is sound (`kv verify`), what goes (`kv rm`), and who may write
(`kv fence`)."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from ...core.errors import ConfigError
from ...core.tiers import TIERS
from ...core.units import format_bytes
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


def stat(args: argparse.Namespace) -> int:
    told = asyncio.run(_asked(args, "stat", {})) if args.kv_store else server_of(args).ask("/admin/kv/tiers")
    if args.json:
        print(json.dumps(told, indent=2))
        return 0
    print("\n".join(stat_page(told)))
    return 0


def stat_page(told: Mapping[str, Any]) -> list[str]:
    rows: list[Sequence[str]] = [
        (
            "TIER",
            "HAS",
            "MOST",
            "BLOCKS",
            "PINNED",
            "HITS",
            "MISSES",
            "LOADED",
            "SAVED",
            "EVICTED",
            "REFUSED",
            "CORRUPT",
        )
    ]
    for tier in sorted(told["tiers"], key=_order):
        counts = told["tiers"][tier]
        rows.append(
            (
                tier, *(_bytes(counts.get(name)) for name in ("bytes", "max_bytes")), str(counts.get("blocks", "-")),
                _bytes(counts.get("pinned_bytes")), *(str(counts.get(name, 0)) for name in ("hits", "misses")),
                *(_bytes(counts.get(name, 0)) for name in ("load_bytes", "save_bytes")),
                *(str(counts.get(name, 0)) for name in ("evictions", "refused", "corrupt")),
            )
        )  # fmt: skip
    lines = [f"KV of {told['numerics_id']}, blocks of {told['block_size']} tokens, "
             f"{' + '.join(format_bytes(each) for each in told['block_bytes'])}", "", *table(rows)]  # fmt: skip
    owners = {name or "(nobody's)": tiers for name, tiers in told.get("owners", {}).items()}
    if len(owners) > 1 or any(name for name in told.get("owners", {})):
        owned: list[Sequence[str]] = [("OWNER", *(tier.upper() for tier in TIERS if tier in told["tiers"]))]
        for name, tiers in owners.items():
            owned.append((name[:40], *(_owned(tiers.get(tier)) for tier in TIERS if tier in told["tiers"])))
        lines += ["", *table(owned)]
    return lines


def ls(args: argparse.Namespace) -> int:
    if args.documents:
        return _find(args)
    if args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}.", param="limit")
    if set(args.prefix.lower()) - set("0123456789abcdef"):
        raise ConfigError(f"--prefix must be hexadecimal, got {args.prefix!r}.", param="prefix")
    asked = {"prefix": args.prefix, "limit": args.limit} | ({"tier": args.tier} if args.tier else {})
    told = asyncio.run(_asked(args, "list", asked))
    if args.json:
        print(json.dumps(told, indent=2))
        return 0
    rows: list[Sequence[str]] = [("KEY", "TIERS", "DEPTH", "GROUP", "BYTES", "USES", "PINNED", "OWNER")]
    rows += [
        (
            block["key"], ",".join(block["tiers"]), str(block["depth"]), str(block["group"]), str(block["bytes"]),
            str(block["uses"]), "yes" if block["pinned"] else "", block["owner"][:24],
        )
        for block in told["blocks"]
    ]  # fmt: skip
    print("\n".join(table(rows)))
    if told["more"]:
        print(f"There are more than {args.limit}: give --limit or --prefix.")
    return 0


def _find(args: argparse.Namespace) -> int:
    """How much of documents is stored; exit code 1 where something is missing."""
    server, missing = server_of(args), 0
    for document in read_documents(args):
        found = server.ask("/admin/kv/find", document.body)
        missing += found["num_stored"] < found["num_blocks"]
        if args.json:
            print(json.dumps({"document": document.name, **found}))
            continue
        where = ", ".join(f"{count} in {tier}" for tier, count in found["tiers"].items()) or "nothing"
        print(f"{document.name}: {found['num_tokens']} tokens, {found['num_blocks']} blocks; stored: {where}")
    return 1 if missing else 0


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if place else text.ljust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


async def _asked(args: argparse.Namespace, what: str, argument: Mapping[str, Any]) -> Any:
    with closing(StoreAdmin(socket_of(args))) as admin:
        return await admin.ask(what, argument)


def _order(tier: str) -> int:
    return TIERS.index(tier) if tier in TIERS else len(TIERS)


def _bytes(count: float | None) -> str:
    return "-" if count is None else format_bytes(count)


def _owned(told: Mapping[str, Any] | None) -> str:
    if told is None:
        return "-"
    quota = told.get("quota")
    return _bytes(told["bytes"]) + (f" of {_bytes(quota)}" if quota is not None else "")
