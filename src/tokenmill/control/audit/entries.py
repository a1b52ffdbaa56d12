"""What the audit log has entries of besides HTTP calls: requests that an engine is given, as each ends and, where that
is wanted, as it comes; and keys and tenants that have come, changed or gone. An admin over HTTP, the command line, or
somebody with the file in an editor: all changes are found by comparing what is known before and after.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ...cluster.events import Ended
from ...core.events import Output, StepOutputs
from ...core.request import Request
from ..tenants.access import Known
from .log import AuditLog


class CallWatch:
    """An Observer. `prompts`: what is told of prompts and answers, one of options.PROMPTS; `decode` gives the text of
    tokens; `model_of` the name of an adapter's digest, or the model's of ""."""

    def __init__(
        self,
        log: AuditLog,
        *,
        tells_coming: bool,
        prompts: str,
        decode: Callable[[Sequence[int]], str],
        model_of: Callable[[str], str],
    ) -> None:
        self._log = log
        self._tells_coming = tells_coming
        self._prompts = prompts
        self._decode = decode
        self._model_of = model_of
        self._running: dict[str, tuple[str, list[int]]] = {}

    def opened(self, requests: Sequence[Request], client: str) -> None:
        for request in requests:
            self._running[request.id] = (client, [])
            if self._tells_coming:
                self._log.note(partial(self._entry, "call.come", request, client, "let in", {}, None))

    def sending(self, outputs: Sequence[Output], step: StepOutputs | None) -> None:
        if self._prompts == "off":
            return
        for output in outputs:
            if output.tokens and (running := self._running.get(output.request_id)) is not None:
                running[1].extend(output.tokens)

    def ended(self, ended: Ended) -> None:
        request, output = ended.request, ended.output
        client, tokens = self._running.pop(request.id, ("", []))
        facts: dict[str, Any] = {"output_tokens": 0}
        if output is not None:
            facts = {"output_tokens": output.num_output, "cached_tokens": output.num_cached}
        self._log.note(partial(self._entry, "call.end", request, client, ended.reason, facts, tokens))

    def _entry(
        self,
        action: str,
        request: Request,
        client: str,
        outcome: str,
        facts: dict[str, Any],
        tokens: Sequence[int] | None,
    ) -> dict[str, Any]:
        """Made by the log's thread: texts and digests take time."""
        return {
            "actor": {"tenant": request.terms.tenant, "client": client},
            "action": action,
            "object": request.id,
            "outcome": outcome,
            "model": self._model_of(request.adapter),
            "prompt_tokens": len(request.prompt_tokens),
            **facts,
            **self._shown("prompt", request.prompt_tokens),
            **({} if tokens is None else self._shown("output", tokens)),
        }

    def _shown(self, name: str, tokens: Sequence[int]) -> dict[str, str]:
        if self._prompts == "off":
            return {}
        if self._prompts == "text":
            return {name: self._decode(tokens)}
        return {f"{name}_sha256": digest_of(tokens)}


def digest_of(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids as little-endian 32-bit numbers."""
    words = array("I", tokens)
    assert words.itemsize == 4
    return hashlib.sha256(words.tobytes()).hexdigest()


def note_changes(log: AuditLog, before: Known, after: Known) -> None:
    for event in changes(before, after):
        log.note(event)


def changes(before: Known, after: Known) -> Iterator[dict[str, Any]]:
    """Of keys the ids are told, of settings what is in `Terms` and limits; never a key or its digest."""
    old, new = _keys(before), _keys(after)
    for name in sorted(new.keys() - old.keys()):
        yield {"action": "key.begin", "object": name, "outcome": "live", **new[name]}
    for name in sorted(old.keys() - new.keys()):
        yield {"action": "key.end", "object": name, "outcome": "ended", **old[name]}
    for name in sorted(before.tenants.keys() | after.tenants.keys()):
        was, is_now = before.tenants.get(name), after.tenants.get(name)
        if was is None or is_now is None:
            yield {"action": "tenant.begin" if was is None else "tenant.end", "object": name, "outcome": "done"}
        elif was != is_now:
            told = {"terms": is_now.terms._asdict(), "limits": is_now.limits._asdict()}
            yield {"action": "tenant.change", "object": name, "outcome": "done", **told}


def _keys(known: Known) -> dict[str, dict[str, Any]]:
    return {each.key: {"tenant": each.tenant.id, "scopes": sorted(each.scopes)} for each in known.credentials.values()}
