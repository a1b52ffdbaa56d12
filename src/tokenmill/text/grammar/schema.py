"""JSON schemas made ready for the library: checked, rewritten where it lacks a keyword, refused by name elsewhere.

What comes out says the same as what came in, in fewer words: references point into one flat `$defs`, annotations are
gone, and `not`, `if`, dependencies and `oneOf` have become `allOf` and `anyOf`. Properties keep their order, which is
the order of an answer.
"""

from __future__ import annotations

from typing import Any

from ...core.errors import InvalidRequest
from . import library
from .blame import find_fault
from .negate import CannotNegate, Negation
from .one_of import settle_one_of
from .refs import References, TooLarge
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
    if message := library.refusal(document):
        path, keyword = find_fault(document, message)
        raise walk.error(walk.origin(*path), keyword, library.plain(message))
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
