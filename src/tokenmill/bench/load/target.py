"""The endpoint under load: which model it serves, in which form it takes prompts, and where its metrics are.

What the user does not say is asked of the server: the model from /v1/models, the prompt form by one short request.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
from dataclasses import dataclass, replace
from typing import Any

from ...core.errors import ConfigError, Unavailable
from .body import BodyFormat, BodyWriter
from .http import Address, Client
from .material import Material
from .plan import Call, Plan
from .stream import Exchange

PROBE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    address: Address
    body: BodyFormat
    metrics_url: str
    timeout_s: float = 600.0

    def facts(self) -> dict[str, Any]:
        return {
            "url": self.address.root_url + self.address.base,
            "api": self.body.api,
            "model": self.body.model,
            "prompt_format": self.body.prompt_format,
            "ignore_eos": self.body.ignore_eos,
            "extra_body": self.body.extra,
            "scripted_replies": self.body.scripted_replies,
            "metrics_url": self.metrics_url,
            "timeout_s": self.timeout_s,
        }


def find_model(address: Address) -> str:
    """The first model the server lists. Raises Unavailable, ConfigError."""
    url = f"{address.root_url}{address.base}/models"
    try:
        return str(json.loads(address.get(url, 10.0, 1 << 20))["data"][0]["id"])
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(
                f"{url} answered {error.code}: name the model with --model, or a key with --api-key.", param="model"
            ) from None
    except OSError as error:
        raise Unavailable(f"No server answers at {url}: {getattr(error, 'reason', error)}.", param="url") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(f"{url} lists no model: name it with --model.", param="model") from None


async def takes_tokens(address: Address, model: str) -> bool:
    """Whether /completions takes a prompt of token ids."""
    body = BodyFormat("completions", "tokens", model)
    client = Client(address, body.path, timeout_s=PROBE_TIMEOUT_S)
    try:
        fields = {"model": model, "prompt": [1000, 1001, 1002, 1003], "max_tokens": 1, "stream": True}
        exchange = await send_one(client, json.dumps(fields).encode())
    finally:
        await client.close()
    if exchange.error in ("connect_error", "connect_timeout"):
        raise Unavailable(f"No server answers at {address.root_url}: {exchange.error_detail}.", param="url")
    return exchange.ok


async def send_one(client: Client, body: bytes) -> Exchange:
    """Send one body and wait for its end."""
    ended: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
    client.send(Exchange(0, time.perf_counter()), body, ended.set_result)
    return await ended


async def warm_up(client: Client, target: Target, plan: Plan, material: Material) -> None:
    """Send the plan's calls one after another. Raises Unavailable if one fails: the load would too."""
    writer = BodyWriter(replace(target.body, scripted_replies=True), material)
    for call in plan.calls:
        alone: Call = replace(call, after=())
        exchange = await send_one(client, writer.write(alone, lambda index: None))
        if not exchange.ok:
            raise Unavailable(
                f"{target.name} failed the first request ({exchange.error}): {exchange.error_detail}", param="url"
            )
