"""KV that somebody names by what it was computed from: the body of a request, as it would be sent, or token ids.

    {"messages": [...]}            a conversation; of a lone system message the part that all begin with
    {"prompt": "..."}              a text, or token ids
    "cache_salt", "model"          as in a request

The keys are those that requests get, by the same way: the tenant of the caller, or the one that an operator names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...api.helper import Caller
from ...api.json_encoder import encode_json
from ...cluster.keys import keys_of
from ...control.kv_store import FOR_EVER, AskStore
from ...core.block import KEY_BYTES, split_keys
from ...core.errors import InvalidRequest
from ..generation import Generation


@dataclass(frozen=True, slots=True)
class WantedKV:
    """keys: of the full blocks, joined; owner: the salt that they are kept under."""

    tokens: tuple[int, ...]
    keys: bytes
    owner: str

    @property
    def num_blocks(self) -> int:
        return len(self.keys) // KEY_BYTES


async def read_wanted(generation: Generation, body: dict[str, Any], caller: Caller) -> WantedKV:
    """Raises InvalidRequest naming the field, and Unavailable while no engine serves."""
    ready = generation.client.require_ready()
    is_chat = body.get("messages") is not None
    if is_chat == (body.get("prompt") is not None):
        raise InvalidRequest("Give either messages or prompt.", param="prompt")
    if is_chat and "add_generation_prompt" not in body and _is_begun(body["messages"]):
        body = {**body, "add_generation_prompt": False}
    call, rendered = await generation.read(
        "chat" if is_chat else "completion", encode_json({**body, "max_tokens": 1}), caller
    )
    if len(call.prompts) > 1:
        raise InvalidRequest("Give one prompt at a time.", param="prompt")
    adapter = generation.check_model({"model": call.model})
    (encoded,) = await generation.encoder.encode_call(call, generation.max_model_len, rendered=rendered, caller=caller)
    owner = caller.tenant.salt_with(call.cache_salt)
    digest = "" if adapter is None else adapter.digest
    tokens = tuple(encoded.tokens)
    return WantedKV(tokens, keys_of(tokens, ready, digest, owner), owner)


async def pin_always(generation: Generation, ask: AskStore, body: dict[str, Any]) -> None:
    """What requests without a tenant have of this prompt is kept, once it comes. Raises InvalidRequest."""
    wanted = await read_wanted(generation, body, Caller())
    keys = [key.hex() for key in split_keys(wanted.keys)]
    await ask("pin", {"keys": keys, "seconds": FOR_EVER, "owner": wanted.owner})


def _is_begun(messages: Any) -> bool:
    """Whether nobody has said anything yet: what follows is not known."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(each, dict) and each.get("role") in ("system", "developer") for each in messages)
    )
