"""The words of JSON Schema: what is enforced as it stands, what is rewritten, what is refused, what has no effect."""

from __future__ import annotations

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
"""Keywords whose value is an array of schemas."""

SCHEMA_MAPS = ("properties", "patternProperties")
"""Keywords whose value is an object of schemas."""

SCHEMAS = ("additionalProperties", "additionalItems")
"""Keywords whose value is a schema."""

COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

REFUSED = {
    "contains": "an array in which some item is to be found cannot be enforced; describe items by prefixItems",
    "minContains": "it belongs to contains, which cannot be enforced",
    "maxContains": "it belongs to contains, which cannot be enforced",
    "unevaluatedItems": "give items or prefixItems in the same place",
    "$dynamicRef": "give $ref",
    "$recursiveRef": "give $ref",
    "x-guidance": "how a schema is enforced is not for the schema to say",
}
"""Keyword -> what to do instead."""

KNOWN = frozenset(
    {
        *TYPES,
        *SCHEMA_LISTS,
        *SCHEMA_MAPS,
        *SCHEMAS,
        *COUNTS,
        *NUMBERS,
        *REFUSED,
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$recursiveAnchor",
        "$ref",
        "$schema",
        "$vocabulary",
        "const",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "deprecated",
        "description",
        "else",
        "enum",
        "examples",
        "format",
        "id",
        "if",
        "items",
        "not",
        "pattern",
        "propertyNames",
        "readOnly",
        "required",
        "then",
        "title",
        "type",
        "unevaluatedProperties",
        "uniqueItems",
        "writeOnly",
    }
) - set(TYPES)

_BY_LETTERS = {word.lower(): word for word in KNOWN}


def meant(word: str) -> str | None:
    """The keyword that an unknown `word` was most likely meant to be; None: it is a word of the caller's own."""
    known = _BY_LETTERS.get(word.lower())
    return known if known is not None and word not in KNOWN else None
