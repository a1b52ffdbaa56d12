"""Request bodies: a call as JSON bytes for /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages,
/v1/embeddings or /v1/rerank.

Pieces are joined, not serialised: drawn parts are already JSON (ids with commas, or words without quotes), so a
prompt of a hundred thousand tokens costs one copy. The dataset's digest is taken here, over what is really sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.errors import ConfigError
from .material import Material
from .plan import Call, Drawn, Literal, Part, Plan, Reply

PATHS = {
    "completions": "/completions",
    "chat": "/chat/completions",
    "responses": "/responses",
    "messages": "/messages",
    "embeddings": "/embeddings",
    "rerank": "/rerank",
}
APIS = tuple(PATHS)
_OWN_FIELDS: dict[str, dict[str, Any]] = {
    "completions": {"stream_options": {"include_usage": True}},
    "chat": {"stream_options": {"include_usage": True}},
    "responses": {"store": False},
}
CHAT_APIS = ("chat", "responses", "messages")
"""Their prompts are conversations, put into words by the model's template."""

POOLING_APIS = ("embeddings", "rerank")
"""Their answers are not text: they have no tokens, and come as a whole."""

Replies = Callable[[int], str | None]
"""What call i answered; None if it has not."""


@dataclass(frozen=True, slots=True)
class BodyFormat:
    """api: one of APIS. prompt_format: "tokens" (completions and embeddings only) or "text". `extra`: further fields of
    every body. scripted_replies: earlier answers in a prompt are drawn text, equal for every server and run. slo: the
    field of that name, of each call."""

    api: str
    prompt_format: str
    model: str
    ignore_eos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    scripted_replies: bool = True
    slo: Callable[[Call], dict[str, int]] | None = None

    def __post_init__(self) -> None:
        assert self.api in APIS, self.api
        assert self.prompt_format in ("tokens", "text"), self.prompt_format
        if self.api in (*CHAT_APIS, "rerank") and self.prompt_format == "tokens":
            raise ConfigError(f"--prompt-format tokens is not for --endpoint {self.api}, which takes text only.")

    @property
    def path(self) -> str:
        return PATHS[self.api]

    @property
    def is_pooling(self) -> bool:
        return self.api in POOLING_APIS


class BodyWriter:
    def __init__(self, body: BodyFormat, material: Material) -> None:
        self.format = body
        self._material = material
        fields: dict[str, Any] = {"model": body.model}
        if not body.is_pooling:
            fields |= {"stream": True, **_OWN_FIELDS.get(body.api, {}), "temperature": 0.0}
            fields |= {"ignore_eos": True} if body.ignore_eos else {}
        self._head = json.dumps(fields | body.extra)[:-1].encode()

    @property
    def is_scripted(self) -> bool:
        """Earlier answers in prompts are drawn, so answers need not be kept. Token ids: always."""
        return self.format.scripted_replies or self.format.prompt_format == "tokens"

    def prepare(self, plan: Plan) -> None:
        """Draw all text of the plan. Raises ConfigError where a part cannot be said in this format."""
        if self.format.prompt_format == "tokens" and plan.has_literals:
            raise ConfigError("This dataset is text: use --prompt-format text.", param="prompt_format")
        if self.format.api == "rerank" and any(len(call.messages) < 2 for call in plan.calls):
            raise ConfigError("--endpoint rerank needs a query and documents: use --dataset-name random.")
        parts = (self._scripted(part) for call in plan.calls for part in call.parts)
        self._material.prepare(part for part in parts if isinstance(part, Drawn))

    def forget(self, label: str) -> None:
        self._material.forget(label)

    def write(self, call: Call, replies: Replies) -> bytes:
        """The JSON body of a call."""
        if self.format.is_pooling:
            return self._write_pooling(call, replies)
        api = self.format.api
        name = "max_completion_tokens" if "max_completion_tokens" in self.format.extra else "max_tokens"
        name = "max_output_tokens" if api == "responses" else name
        head = b'%b,"%b":%d,' % (self._head, name.encode(), call.output_tokens)
        if call.tenant:
            user = json.dumps(call.tenant).encode()
            head += b'"metadata":{"user_id":%b},' % user if api == "messages" else b'"user":%b,' % user
        if self.format.slo is not None:
            head += b'"slo":%b,' % json.dumps(self.format.slo(call)).encode()
        if api == "completions":
            return b'%b"prompt":%b}' % (head, self._prompt(call.parts, replies))
        if api == "messages":
            system = b"\\n\\n".join(self._text(each.parts, replies) for each in call.messages if each.role == "system")
            head += b'"system":"%b",' % system if system else b""
        messages = (
            b'{"role":"%b","content":"%b"}' % (message.role.encode(), self._text(message.parts, replies))
            for message in call.messages
            if api != "messages" or message.role != "system"
        )
        return b'%b"%b":[%b]}' % (head, b"input" if api == "responses" else b"messages", b",".join(messages))

    def _write_pooling(self, call: Call, replies: Replies) -> bytes:
        """Every message is a text of its own; a rerank's first is the query."""
        texts = [self._prompt(message.parts, replies) for message in call.messages]
        head = b"%b," % self._head
        if call.tenant:
            head += b'"user":%b,' % json.dumps(call.tenant).encode()
        if self.format.api == "rerank":
            return b'%b"query":%b,"documents":[%b]}' % (head, texts[0], b",".join(texts[1:]))
        return b'%b"input":%b}' % (head, texts[0] if len(texts) == 1 else b"[%b]" % b",".join(texts))

    def _prompt(self, parts: tuple[Part, ...], replies: Replies) -> bytes:
        """A list of ids or a string."""
        if self.format.prompt_format == "tokens":
            pieces = (self._material.draw(part) for part in map(self._scripted, parts) if isinstance(part, Drawn))
            return b"[%b]" % self._material.separator.join(piece for piece in pieces if piece)
        return b'"%b"' % self._text(parts, replies)

    def _text(self, parts: tuple[Part, ...], replies: Replies) -> bytes:
        return b"".join(self._piece(part, replies) for part in parts)

    def _piece(self, part: Part, replies: Replies) -> bytes:
        part = self._scripted(part)
        if isinstance(part, Drawn):
            return self._material.draw(part)
        text = part.text if isinstance(part, Literal) else replies(part.index)
        return json.dumps(text or "")[1:-1].encode()

    def _scripted(self, part: Part) -> Part:
        if isinstance(part, Reply) and self.is_scripted:
            return Drawn(f"reply/{part.index}", part.num_tokens)
        return part

    def digest(self, plan: Plan) -> str:
        """SHA-256 of when each call is due and of its body, the model's name left out, so that equal loads on several
        servers have equal digests. Replies that are not known yet count as empty."""
        nameless = BodyWriter(replace(self.format, model=""), self._material)
        whole = hashlib.sha256()
        for call in plan.calls:
            whole.update(repr((call.delay_s, call.after)).encode())
            whole.update(nameless.write(call, lambda index: None))
        return whole.hexdigest()
