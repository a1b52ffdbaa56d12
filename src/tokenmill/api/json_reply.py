"""A response whose body is JSON."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from .json_encoder import encode_json


class JSONReply(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)
