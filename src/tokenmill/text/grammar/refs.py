"""What the references of a schema name, and where its parts are, as JSON pointers. Nothing is fetched."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

MAX_NODES = 50_000
MAX_DEPTH = 100

_DATA = frozenset({"enum", "const", "default", "examples", "example"})
"""Keywords whose value is data: what is in it is no schema, whatever it looks like."""

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Keywords whose value is an object of schemas: its keys are the caller's names, not keywords."""


class TooLarge(Exception):
    """The schema has more parts, or is nested deeper, than is read. `args[0]`: in words."""


class References:
    """An index of one schema document. `root`: JSON data, not changed while this lives."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._pointers: dict[int, str] = {}
        self._bases: dict[int, str] = {}
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[str, Any] = {}
        self._num_nodes = 0
        self._read(root, "#", "", 0, "schema")

    def pointer(self, node: Any) -> str:
        """Where `node`, an object of the document, is."""
        return self._pointers.get(id(node), "#")

    def resolve(self, node: dict[str, Any], reference: str) -> Any:
        """What `$ref: reference` in `node` names; None: nothing in this document."""
        base, _ = urldefrag(self._bases.get(id(node), ""))
        where, fragment = urldefrag(urljoin(base, reference) if reference.partition("#")[0] else base + reference)
        if where not in self._resources:
            return None
        target = self._resources[where]
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(f"{where}#{unquote(fragment)}")
        for step in unquote(fragment).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isascii() and step.isdigit() and int(step) < len(target):
                target = target[int(step)]
            else:
                return None
        return target

    def _read(self, node: Any, pointer: str, base: str, depth: int, role: str) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise TooLarge(f"it has more than {MAX_NODES} parts")
        if depth > MAX_DEPTH:
            raise TooLarge(f"it is nested deeper than {MAX_DEPTH}")
        if isinstance(node, dict):
            if role == "schema":
                base = self._enter(node, pointer, base)
            for key, value in node.items():
                step = key.replace("~", "~0").replace("/", "~1")
                self._read(value, f"{pointer}/{step}", base, depth + 1, _role_within(role, key))
        elif isinstance(node, list):
            for number, value in enumerate(node):
                self._read(value, f"{pointer}/{number}", base, depth + 1, role)

    def _enter(self, node: dict[str, Any], pointer: str, base: str) -> str:
        """Note what a schema calls itself. Gives the base of references in it."""
        for word in ("$id", "id"):
            name = node.get(word)
            if isinstance(name, str) and name and not (word == "id" and "$ref" in node):
                if name.startswith("#"):
                    self._anchors.setdefault(f"{base}#{name[1:]}", node)
                    continue
                base = urldefrag(urljoin(base, name))[0]
                self._resources.setdefault(base, node)
        for word in ("$anchor", "$dynamicAnchor"):
            anchor = node.get(word)
            if isinstance(anchor, str):
                self._anchors.setdefault(f"{base}#{anchor}", node)
        self._pointers[id(node)] = pointer
        self._bases[id(node)] = base
        return base


def _role_within(role: str, key: str) -> str:
    """What the value of `key` is in something of `role`: a schema, a map of names to schemas, or data."""
    if role == "schema":
        return "data" if key in _DATA else "map" if key in _MAPS else "schema"
    return "schema" if role == "map" else "data"
