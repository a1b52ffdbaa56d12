"""What a reader of KV events makes of them."""

from __future__ import annotations

from typing import Any

from tokenmill.core.kv_events import CLEARED, REMOVED, TokenEvent


class Tree:
    """The tokens of each block that is held, with all before it."""

    def __init__(self) -> None:
        self.prefixes: dict[Any, tuple[int, ...]] = {}

    def hear(self, events: tuple[TokenEvent, ...] | list[TokenEvent]) -> None:
        for event in events:
            if event.kind == CLEARED:
                self.prefixes.clear()
            elif event.kind == REMOVED:
                for name in event.blocks:
                    del self.prefixes[name]
            else:
                before = () if event.parent is None else self.prefixes[event.parent]
                for index, name in enumerate(event.blocks):
                    assert name not in self.prefixes
                    before += event.tokens[index * event.block_size : (index + 1) * event.block_size]
                    self.prefixes[name] = before
