"""`kv export`, `kv import`: KV in a file, from one machine to another that computes alike."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from ...core.errors import ConfigError
from ...core.tiers import BlockFacts, Lease
from ...core.units import MiB, format_bytes
from ...kv.transfer.archive import ArchiveHead, ArchiveWriter, BadArchive, read_blocks, read_head
from ...kv.transfer.checksum import block_sum
from ...kv.transfer.client import StoreClient
from ..kv_admin import StoreAdmin
from .documents import read_documents
from .server import server_of, socket_of

BATCH_BYTES = 64 * MiB
MOST_LISTED = 100_000


def export(args: argparse.Namespace) -> int:
    """Exit code 1: some of what was named is not in the archive."""
    if bool(args.documents) == args.all:
        raise ConfigError("Say what is to be exported: DOCUMENT..., or --all.")
    path, missing = Path(args.file).expanduser(), 0
    found: dict[str, None] = {}
    for document in read_documents(args):
        said = server_of(args).ask("/admin/kv/find", document.body)
        missing += said["num_stored"] < said["num_blocks"]
        found |= dict.fromkeys(said["keys"][: said["num_stored"]])
        print(f"{document.name}: {said['num_stored']} of {said['num_blocks']} blocks are stored", file=sys.stderr)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            keys = None if args.all else list(found)
            writer, num_left = asyncio.run(_export(socket_of(args), file, keys, args.most))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        part.unlink(missing_ok=True)
    print(f"{path}: {writer.num_blocks} blocks, {format_bytes(writer.num_bytes)}; it is as secret as the documents are")
    if num_left:
        print(f"{path}: {num_left} or more blocks are not in it", file=sys.stderr)
    return 1 if missing or (num_left and args.most is None) else 0


def load(args: argparse.Namespace) -> int:
    """Exit code 1: the archive is damaged, or the store did not take all."""
    try:
        with Path(args.file).expanduser().open("rb") as file:
            num_blocks, num_kept, why = asyncio.run(_load(socket_of(args), file, args.pin))
    except OSError as error:
        raise ConfigError(f"{args.file} cannot be read: {error.strerror or error}.") from error
    print(f"{args.file}: {num_blocks} blocks, of which {num_kept} are in the store now")
    if why:
        print(f"{args.file}: {why}", file=sys.stderr)
    return 1 if why or num_kept < num_blocks else 0


async def _export(
    socket: str, file: IO[bytes], keys: Sequence[str] | None, most: int | None
) -> tuple[ArchiveWriter, int]:
    """What was written, and how many blocks at least were not: they went meanwhile, a remote store alone has them,
    there are more than are listed, or more than `most` bytes."""
    with closing(StoreAdmin(socket)) as admin:
        stat = await admin.ask("stat", {})
        listed = await admin.ask("list", {"limit": MOST_LISTED})
        facts = _facts(listed["blocks"], keys)
        head = ArchiveHead(stat["numerics_id"], tuple(stat["block_bytes"]), stat["block_size"])
        client = await _joined(socket, head)
        writer = ArchiveWriter(file, head)
        try:
            for batch in _batches(facts, head.block_bytes):
                if most is not None and writer.num_bytes >= most:
                    break
                await _export_batch(client, head, batch, writer)
        finally:
            client.leave()
        writer.close()
        wanted = len(facts) + listed["more"] if keys is None else len(keys) * len(head.block_bytes)
        return writer, wanted - writer.num_blocks


async def _export_batch(
    client: StoreClient, head: ArchiveHead, batch: Sequence[BlockFacts], writer: ArchiveWriter
) -> None:
    came: dict[int, tuple[bytes, int]] = {}

    async def take(leases: Sequence[Lease]) -> Sequence[int]:
        bad = []
        for lease in leases:
            block = batch[lease.nth].block
            data = bytes(client.view(lease.offset, head.block_bytes[block[0]]))
            if block_sum(block, data) == lease.sum:
                came[lease.nth] = data, lease.sum
            else:
                bad.append(lease.nth)
        return bad

    await client.fetch([each.block for each in batch], take)
    for nth, each in enumerate(batch):
        if nth in came:
            writer.add(each, *came[nth])


async def _load(socket: str, file: IO[bytes], pins: bool) -> tuple[int, int, str]:
    """(blocks read, blocks kept, what is wrong with the archive)"""
    num_read = num_kept = 0
    why = ""
    try:
        head = read_head(file)
    except BadArchive as error:
        raise ConfigError(f"The archive cannot be used: {error}") from error
    client = await _joined(socket, head)
    batch: list[tuple[BlockFacts, bytes, int]] = []

    async def store() -> None:
        nonlocal num_kept
        if pins:
            client.pin([facts.block for facts, _, _ in batch], -1.0)
        num_kept += await _load_batch(client, batch)
        batch.clear()

    try:
        blocks = read_blocks(file, head.block_bytes)
        while True:
            try:
                each = next(blocks, None)
            except BadArchive as error:
                each, why = None, str(error)
            if each is not None:
                batch.append(each)
                num_read += 1
            if batch and (each is None or sum(len(data) for _, data, _ in batch) >= BATCH_BYTES):
                await store()
            if each is None:
                return num_read, num_kept, why
    finally:
        client.leave()


async def _load_batch(client: StoreClient, batch: Sequence[tuple[BlockFacts, bytes, int]]) -> int:
    """How many are in the store then."""

    async def fill(slots: Sequence[tuple[int, int]]) -> Sequence[int]:
        for nth, offset in slots:
            data = batch[nth][1]
            client.view(offset, len(data))[:] = data
        return [batch[nth][2] for nth, _ in slots]

    await client.store([facts for facts, _, _ in batch], fill)
    digits = await client.find([facts.block for facts, _, _ in batch])
    return sum(digit != "0" for digit in digits)


async def _joined(socket: str, head: ArchiveHead) -> StoreClient:
    """Raises ConfigError where the store has KV of something else."""
    try:
        return await StoreClient.connect(socket, head.numerics_id, head.block_bytes, "kv-archive")
    except OSError as error:
        raise ConfigError(f"There is no KV store at {socket}: {error}.") from error


def _facts(blocks: Iterable[dict[str, Any]], keys: Sequence[str] | None) -> list[BlockFacts]:
    """Of those with one of the keys (None: of all), parents before children."""
    wanted = None if keys is None else set(keys)
    found = [_fact(each) for each in blocks if wanted is None or each["key"] in wanted]
    return sorted(found, key=lambda facts: (facts.depth, facts.block))


def _fact(told: dict[str, Any]) -> BlockFacts:
    key, parent = bytes.fromhex(told["key"]), bytes.fromhex(told["parent"])
    return BlockFacts((told["group"], key), parent, told["depth"], told["owner"])


def _batches(facts: Sequence[BlockFacts], block_bytes: Sequence[int]) -> Iterable[list[BlockFacts]]:
    batch: list[BlockFacts] = []
    size = 0
    for each in facts:
        batch.append(each)
        size += block_bytes[each.block[0]]
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
