"""A client's body as an upstream gets it: the fields as they came, but for the model's name, the tenant's salt and the
wish for a count of tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...api.json_encoder import encode_json
from ...core.errors import InvalidRequest
from ...core.tenant import Tenant

_USAGE_PATHS = ("/v1/chat/completions", "/v1/completions")
"""Streams of these tell the tokens they used only where they are asked to."""

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Passed:
    """What goes to an upstream. stream: the answer is to be one; hides_usage: the client has not asked for the count of
    tokens that its stream will have; max_tokens: 0 where the call names none."""

    def __init__(self, path: str, body: bytes, tenant: Tenant) -> None:
        """Raises InvalidRequest."""
        try:
            self._fields: dict[str, Any] = dict(_decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"The body is not a JSON object: {str(error)[:200]}.") from None
        self.stream = self._value("stream") is True
        wanted = [self._value(name) for name in _LIMITS]
        self.max_tokens = next((each for each in wanted if type(each) is int and 0 < each < 2**31), 0)
        self.hides_usage = False
        if self.stream and path in _USAGE_PATHS:
            given = self._value("stream_options")
            options = dict(given) if isinstance(given, dict) else {}
            if not options.get("include_usage"):
                self.hides_usage = True
                self._fields["stream_options"] = options | {"include_usage": True}
        if tenant.salt:
            salt = self._value("cache_salt")
            self._fields["cache_salt"] = tenant.salt_with(salt if isinstance(salt, str) else "")

    def body(self, model: str) -> bytes:
        """For an upstream that calls the model so."""
        return encode_json(self._fields | {"model": model})

    def _value(self, name: str) -> Any:
        raw = self._fields.get(name)
        try:
            return None if raw is None else _decode_any(raw)
        except RecursionError:
            raise InvalidRequest(f"{name} is nested too deeply.", param=name) from None
