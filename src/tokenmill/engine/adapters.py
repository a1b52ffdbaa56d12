"""Which LoRA adapters requests may name, and when one that was unloaded is free of its last request. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Uses:
    loads: int = 0
    users: int = 0


class AdapterLedger:
    """Adapters by digest. Loads count: one that was loaded twice is taken until it has been unloaded twice."""

    def __init__(self) -> None:
        self._uses: dict[str, _Uses] = {}

    def __bool__(self) -> bool:
        return bool(self._uses)

    def load(self, digest: str) -> None:
        self._uses.setdefault(digest, _Uses()).loads += 1

    def unload(self, digest: str) -> None:
        """An adapter that is not loaded is ignored."""
        if self.takes(digest):
            self._uses[digest].loads -= 1

    def takes(self, digest: str) -> bool:
        """Whether a new request may name it."""
        return digest in self._uses and self._uses[digest].loads > 0

    def begin(self, digest: str) -> None:
        self._uses[digest].users += 1

    def end(self, digest: str) -> None:
        self._uses[digest].users -= 1

    def take_unused(self) -> list[str]:
        """Adapters that are neither loaded nor used any more; they are forgotten here."""
        unused = [digest for digest, uses in self._uses.items() if not uses.loads and not uses.users]
        for digest in unused:
            del self._uses[digest]
        return unused

    def check(self, users: dict[str, int]) -> None:
        """Assert that the users counted are `users`."""
        counted = {digest: uses.users for digest, uses in self._uses.items() if uses.users}
        assert counted == users, (counted, users)
