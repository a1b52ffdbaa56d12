"""What a front end asks of its KV store, across the store's lives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from test_kv_store_link import SIZE, SLAB, joined, on_a_loop, serving

from tokenmill.cli.kv_admin import StoreAdmin
from tokenmill.core.block import KEY_BYTES
from tokenmill.kv.tiers.config import TierConfig
from tokenmill.kv.tiers.manager import TierManager


def manager() -> TierManager:
    return TierManager(TierConfig("numerics", (SIZE,), SLAB))


@on_a_loop
async def test_what_was_pinned_for_ever_is_pinned_again_in_a_store_that_was_restarted(tmp_path: Path) -> None:
    """But what was unpinned, or pinned for a while."""
    path, keys = tmp_path / "kv", [nth.to_bytes(KEY_BYTES, "big").hex() for nth in range(6)]
    admin = StoreAdmin(str(path))
    async with serving(path, manager()):
        worker = await joined(path)
        await admin.ask("pin", {"keys": keys[:3], "seconds": -1.0, "owner": "a"})
        await admin.ask("pin", {"keys": keys[3:5], "seconds": -1.0, "owner": "b"})
        await admin.ask("pin", {"keys": keys[5:], "seconds": 60.0, "owner": "a"})
        await admin.ask("pin", {"keys": keys[:1], "seconds": 0.0, "owner": "a"})
        assert json.loads(await worker.inquire("pins"))["num"] == 5
    async with serving(path, manager()), asyncio.timeout(30):
        while not worker.is_there or (pins := json.loads(await worker.inquire("pins")))["num"] < 4:
            await asyncio.sleep(0.01)
        assert {(each["key"], each["owner"], each["seconds"]) for each in pins["pins"]} == {
            *((key, "a", None) for key in keys[1:3]),
            *((key, "b", None) for key in keys[3:5]),
        }
        admin.close()
        await worker.close()
