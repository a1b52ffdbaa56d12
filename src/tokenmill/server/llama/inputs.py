"""Bodies of /embedding as validated calls. Pure."""

from __future__ import annotations

from typing import Any

from ...core.errors import InvalidRequest
from ..fields import Fields
from ..openai import Rules
from ..other_fields import Refused, Table, check
from ..pooling import PoolingCall, parse_embedding
from ..renamed import said_as

EMBEDDING: Table = {
    "encoding_format": Refused(("float",), "use /v1/embeddings"),
    "image_data": Refused(([],), "this model takes text alone"),
}


def parse_llama_embedding(body: dict[str, Any], rules: Rules) -> tuple[PoolingCall, list[str]]:
    """`content`, or `input` as OpenAI calls it. (the call, the names of unknown fields). Raises InvalidRequest."""
    fields = Fields(body)
    check(fields, EMBEDDING)
    content = fields.any("content")
    name = "input" if content is None else "content"
    if content is not None and fields.any("input") is not None:
        raise InvalidRequest("content and input are the same; give one.", param="content")
    norm = fields.integer("embd_normalize", -1, 2**31 - 1)
    if norm not in (None, -1, 2):
        raise InvalidRequest(
            "embd_normalize may be 2 (length 1) or -1 (as the model gives it).", param="embd_normalize"
        )
    rest = {key: value for key, value in body.items() if key not in ("content", "embd_normalize", *EMBEDDING)}
    with said_as({"input": name}):
        return parse_embedding(
            rest | {"input": body.get(name)} | ({} if norm is None else {"normalize": norm == 2}), rules
        )
