"""JSON schemas made ready for the library: checked, rewritten where it lacks a keyword, refused by name elsewhere.

What comes out says the same as what came in, in fewer words: references point into one flat `$defs`, annotations are
gone, and `not`, `if`, dependencies and `oneOf` have become `allOf` and `anyOf`. Properties keep their order, which is
the order of an answer.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from ...core.errors import InvalidRequest
from .negate import CannotNegate, Negation, settle_one_of
from .refusals import find_fault, plain, refusal
from .rewrite import rewrite

MAX_REFS = 1000

_INSTEAD = {
    "oneOf": "; its options may hold together: make them differ in a required property that is const, or give anyOf",
}
"""Keyword -> what else to do where its opposite cannot be said."""

Schema = dict[str, Any] | bool


def prepare(schema: Any, param: str) -> dict[str, Any]:
    """`schema` as the library takes it. Raises InvalidRequest that names `param`, the keyword and its JSON pointer.

    Costs some compilations by the library: below a millisecond for most schemas, much more for the largest.
    """
    try:
        refs = References(schema)
    except TooLarge as error:
        raise InvalidRequest(f"{param} is too large a schema: {error.args[0]}.", param=param) from None
    walk = Walk(refs, param)
    try:
        document = walk.document()
        settle_one_of(document, walk.negation, walk.origin)
    except CannotNegate as error:
        pointer, keyword = error.asked
        raise walk.error(pointer, keyword, f"{error.reason}{_INSTEAD.get(keyword, '')}") from None
    if message := refusal(document):
        path, keyword = find_fault(document, message)
        raise walk.error(walk.origin(*path), keyword, plain(message))
    return document


class Walk:
    """One pass over what can be reached from the root."""

    def __init__(self, refs: References, param: str) -> None:
        self._refs = refs
        self._param = param
        self._names: dict[int, str] = {}
        self._pending: list[tuple[str, Any]] = []
        self._origins: dict[int, str] = {}
        self._defs: dict[str, Schema] = {}
        self.negation = Negation(self._defs)

    def document(self) -> dict[str, Any]:
        """The whole schema rewritten, with its definitions in `$defs`. Raises CannotNegate."""
        root = self.visit(self._refs.root, "#")
        while self._pending:
            name, node = self._pending.pop()
            self._defs[name] = self.visit(node, self._refs.pointer(node))
        self.negation.complete()
        document = {**_as_object(root), "$defs": self._defs}
        self._origins[id(document)] = "#"
        return document

    def origin(self, *path: Any) -> str:
        """Where the last part of `path` that the caller wrote comes from, as a JSON pointer."""
        known = [self._origins[id(node)] for node in path if id(node) in self._origins]
        return known[-1] if known else "#"

    def error(self, pointer: str, keyword: str, reason: str) -> InvalidRequest:
        return InvalidRequest(f"{self._param}: {keyword!r} at {pointer}: {reason}.", param=self._param)

    def visit(self, node: Any, pointer: str) -> Schema:
        """The schema `node` at `pointer`, rewritten."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            message = f"{self._param}: the schema at {pointer} must be an object, true or false."
            raise InvalidRequest(message, param=self._param)
        result = rewrite(node, pointer, self)
        if isinstance(result, dict):
            self._origins[id(result)] = pointer
        return result

    def reference(self, node: dict[str, Any], pointer: str) -> Schema:
        """What stands for the `$ref` of `node`."""
        text = node["$ref"]
        if not isinstance(text, str):
            raise self.error(pointer, "$ref", "it must be a string")
        target = self._refs.resolve(node, text)
        if target is None:
            raise self.error(pointer, "$ref", f"there is no {text[:200]!r} in this schema, and nothing is fetched")
        if isinstance(target, bool):
            return target
        name = self._names.get(id(target))
        if name is None:
            if len(self._names) >= MAX_REFS:
                raise self.error(pointer, "$ref", f"more than {MAX_REFS} definitions are referred to")
            name = self._names[id(target)] = str(len(self._names))
            self._pending.append((name, target))
        return {"$ref": f"#/$defs/{name}"}


def _as_object(schema: Schema) -> dict[str, Any]:
    return ({} if schema else {"enum": []}) if isinstance(schema, bool) else schema


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
