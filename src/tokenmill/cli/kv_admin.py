"""What a front end and the `kv` commands ask the KV store of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from ..control.kv_store import FOR_EVER
from ..core.errors import ConfigError, InvalidRequest, Unavailable
from ..core.tiers import TierKey
from ..kv.transfer.client import StoreClient


class StoreAdmin:
    """Joins the store at `path` when it is first asked, and again after it had gone: then it says again what was pinned
    for ever by it. `ask` is a control.kv_store.AskStore."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._client: StoreClient | None = None
        self._joining = asyncio.Lock()
        self._num_groups = 0
        self._pins: dict[TierKey, str] = {}  # for ever, and whose

    async def ask(self, what: str, argument: Mapping[str, Any]) -> Any:
        """Raises Unavailable and InvalidRequest."""
        try:
            client = await self.client()
            match what:
                case "find":
                    blocks = await self._blocks(client, argument["keys"])
                    digits = await client.find(blocks)
                    num_keys = len(argument["keys"])
                    return {"digits": [digits[at : at + num_keys] for at in range(0, len(digits), num_keys or 1)]}
                case "pin":
                    seconds, owner = argument["seconds"], argument["owner"]
                    blocks = await self._blocks(client, argument["keys"])
                    if seconds < 0:
                        self._pins.update(dict.fromkeys(blocks, owner))
                    elif not seconds:
                        for block in blocks:
                            self._pins.pop(block, None)
                    client.pin(blocks, seconds, owner)
                    return {}
                case "drop":
                    client.drop(await self._blocks(client, argument["keys"]))
                    return {}
            told = json.loads(await client.inquire(what, json.dumps(argument)) or "{}")
            return {**told, "socket": self.path} if what == "stat" else told
        except OSError as error:
            raise Unavailable(f"The KV store does not answer: {error}") from error
        except ConfigError as error:
            raise InvalidRequest(error.message) from error

    async def client(self) -> StoreClient:
        """Raises OSError where there is no store, and ConfigError where it refuses."""
        async with self._joining:
            if self._client is None:
                self._client = await StoreClient.connect(self.path)
                self._client.when_rejoined = self._pin_again
            return self._client

    def _pin_again(self) -> None:
        by_owner: dict[str, list[TierKey]] = {}
        for block, owner in self._pins.items():
            by_owner.setdefault(owner, []).append(block)
        for owner, blocks in by_owner.items():
            with contextlib.suppress(OSError):
                assert self._client is not None
                self._client.pin(blocks, FOR_EVER, owner)

    async def _blocks(self, client: StoreClient, keys: list[str]) -> list[TierKey]:
        """Of all groups, one group after the other."""
        if not self._num_groups:
            self._num_groups = len(json.loads(await client.inquire("stat"))["block_bytes"])
        return [(group, bytes.fromhex(key)) for group in range(self._num_groups) for key in keys]

    def close(self) -> None:
        if self._client is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._client.leave()
