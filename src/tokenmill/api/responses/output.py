"""The output items of one response as they grow, and the events that tell of it. Pure.

Parts of a choice in, items out: text becomes a message, reasoning an item of its own, each call one more. Events have
the order that OpenAI's have: an item is added, its part is added, deltas, the part is done, the item is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from ...text.parts import CallArguments, CallStart, Content, Part, Reasoning

Event = tuple[str, dict[str, Any]]
"""Type and fields of a server-sent event, but for its sequence number."""

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
_DELTAS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_CALLS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
    "mcp_call": ("response.mcp_call_arguments", "arguments"),
    "mcp_approval_request": ("", "arguments"),
}
"""Of calls: their events, and the field of what the tool is given."""
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}


def item_id(kind: str, base: str, number: int) -> str:
    """The id of item `number` (input items first, then output) of the response whose id ends with `base`."""
    return f"{_PREFIXES[kind]}_{base}{number:05x}"


def response_of(identifier: str) -> str:
    """The id of the response that an item of `item_id` belongs to; "" for an id of another form."""
    kind, _, rest = identifier.partition("_")
    return f"resp_{rest[:-5]}" if kind in _PREFIXES.values() and len(rest) > 5 else ""


class Output:
    """`base`: what the ids of this response's items begin with; `first`: the number of the first. `namespaces`: of
    functions that are in one: that, and their names there."""

    def __init__(
        self,
        base: str,
        first: int = 0,
        namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        mcp: Mapping[str, tuple[str, str, bool]] = MappingProxyType({}),
    ) -> None:
        self._base = base
        self._mcp = mcp
        self._namespaces = namespaces
        self._first = first
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []

    @property
    def place(self) -> tuple[str, str, int]:
        """Of the open item: its kind ("": none is open), its id, its index in the output."""
        if self._open is None:
            return "", "", len(self._done)
        return self._open["type"], self._open["id"], len(self._done)

    def items(self) -> list[dict[str, Any]]:
        """All items as they are now."""
        return [*self._done, *([] if self._open is None else [self._filled(IN_PROGRESS)])]

    def push(self, parts: Iterable[Part], logprobs: bytes | None = None) -> list[Event]:
        """`logprobs`: of the tokens that the text of these parts came with, as a JSON array; None: none are wanted.
        They go to the last text among the parts."""
        events: list[Event] = []
        parts = list(parts)
        last = max((number for number, part in enumerate(parts) if isinstance(part, Content)), default=-1)
        for number, part in enumerate(parts):
            if isinstance(part, CallStart):
                if part.name in self._mcp:
                    label, own, needs_approval = self._mcp[part.name]
                    kind = "mcp_approval_request" if needs_approval else "mcp_call"
                    self._add(kind, events, {"server_label": label, "name": own, "arguments": ""})
                    continue
                namespace, name = self._namespaces.get(part.name, ("", part.name))
                placed = {"namespace": namespace} if namespace else {}
                kind = "custom_tool_call" if part.is_custom else "function_call"
                self._add(kind, events, {"call_id": part.id, "name": name, **placed, _CALLS[kind][1]: ""})
                continue
            if isinstance(part, CallArguments):
                assert self._open is not None and self._open["type"] in _CALLS, (part, self._open)
            else:
                self._begin("reasoning" if isinstance(part, Reasoning) else "message", events)
            if not part.text:
                continue
            self._texts.append(part.text)
            if self._open is not None and self._open["type"] == "mcp_approval_request":
                continue
            events.append(self._delta(part.text, logprobs if number == last else None))
        return events

    def add_text(self, text: str) -> None:
        """More text of the open item, whose event the caller writes."""
        self._texts.append(text)

    def put(self, item: dict[str, Any]) -> list[Event]:
        """An item that is whole: the tools of an MCP server, or a call that was approved."""
        events: list[Event] = []
        self._close(COMPLETED, events)
        item = {"id": item_id(item["type"], self._base, self._first + len(self._done))} | item
        where = {"item_id": item["id"], "output_index": len(self._done)}
        kind = item["type"]
        state = "failed" if item.get("error") is not None else "completed"
        events.append(("response.output_item.added", {"output_index": len(self._done), "item": item}))
        events += [(f"response.{kind}.{name}", where) for name in ("in_progress", state)]
        events.append(("response.output_item.done", {"output_index": len(self._done), "item": item}))
        self._done.append(item)
        return events

    def wait(self) -> tuple[dict[str, Any], list[Event]]:
        """(the open call of an MCP server's tool, whose arguments are whole, what tells of it); `resolve` it."""
        assert self._open is not None and self._open["type"] == "mcp_call", self._open
        where = {"item_id": self._open["id"], "output_index": len(self._done)}
        arguments = "".join(self._texts)
        events = [
            ("response.mcp_call_arguments.done", where | {"arguments": arguments}),
            ("response.mcp_call.in_progress", where),
        ]
        self._open |= {"arguments": arguments, "approval_request_id": None}
        return self._open, events

    def resolve(self, result: dict[str, Any]) -> list[Event]:
        """What the call gave: `output` and `error` of its item."""
        assert self._open is not None
        state = "completed" if result["error"] is None else "failed"
        item = self._open | result | {"status": state}
        where = {"item_id": item["id"], "output_index": len(self._done)}
        index = len(self._done)
        self._done.append(item)
        self._open = None
        self._texts.clear()
        return [
            (f"response.mcp_call.{state}", where),
            ("response.output_item.done", {"output_index": index, "item": item}),
        ]

    def end(self, status: str) -> list[Event]:
        """Close what is open: `status` is the last item's. What said nothing has one empty message."""
        events: list[Event] = []
        if not self._done and self._open is None and status == COMPLETED:
            self._begin("message", events)
        self._close(status, events)
        return events

    def _begin(self, kind: str, events: list[Event]) -> None:
        """Open an item of text, unless one of that kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        if kind == "message":
            self._add(kind, events, {"role": "assistant", "content": []})
        else:
            self._add(kind, events, {"summary": [], "content": []})
        events.append(("response.content_part.added", self._where() | {"part": self._part("")}))

    def _add(self, kind: str, events: list[Event], fields: dict[str, Any]) -> None:
        self._close(COMPLETED, events)
        number = self._first + len(self._done)
        self._open = {"id": item_id(kind, self._base, number), "type": kind, "status": IN_PROGRESS, **fields}
        events.append(("response.output_item.added", {"output_index": len(self._done), "item": dict(self._open)}))

    def _close(self, status: str, events: list[Event]) -> None:
        if self._open is None:
            return
        kind, text, where = self._open["type"], "".join(self._texts), self._where()
        if kind in _CALLS:
            where.pop("content_index")
            event, given = _CALLS[kind]
            named = {"name": self._open["name"]} if kind == "function_call" else {}
            if event:
                events.append((f"{event}.done", where | named | {given: text}))
        else:
            done = where | {"text": text}
            if kind == "message":
                done["logprobs"] = self._all_logprobs()
            events.append((f"{_DELTAS[kind]}.done", done))
            events.append(("response.content_part.done", where | {"part": self._part(text)}))
        item = self._filled(status)
        events.append(("response.output_item.done", {"output_index": len(self._done), "item": item}))
        self._done.append(item)
        self._open = None
        self._texts.clear()
        self._logprobs.clear()

    def _delta(self, text: str, logprobs: bytes | None) -> Event:
        assert self._open is not None
        kind, where = self._open["type"], self._where()
        if kind in _CALLS:
            where.pop("content_index")
            return f"{_CALLS[kind][0]}.delta", where | {"delta": text}
        delta = where | {"delta": text}
        if kind == "message":
            if logprobs is not None:
                self._logprobs.append(logprobs)
            delta["logprobs"] = msgspec.Raw(logprobs or b"[]")
        return f"{_DELTAS[kind]}.delta", delta

    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._done), "content_index": 0}

    def _filled(self, status: str) -> dict[str, Any]:
        """The open item with what it holds so far."""
        assert self._open is not None
        text = "".join(self._texts)
        if (kind := self._open["type"]) in _CALLS:
            filled = self._open | {"status": status, _CALLS[kind][1]: text}
            if kind == "mcp_call":
                filled |= {"output": None, "error": None, "approval_request_id": None}
            return filled
        return self._open | {"status": status, "content": [self._part(text)]}

    def _part(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._all_logprobs()}

    def _all_logprobs(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + b",".join(each[1:-1] for each in self._logprobs if len(each) > 2) + b"]")
