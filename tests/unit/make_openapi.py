"""Writes the OpenAPI document that a server shows: its paths and fields are those of docs/api.md, from the same tables.

python tests/unit/make_api_doc.py   writes both.
"""

from __future__ import annotations

import copy
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import api_files
import api_kv
import api_record
import api_words as words
import make_api_doc
from api_schemas import Schema, example_schema, object_of, plain

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.options import options_of
from tokenmill.server import openapi
from tokenmill.server.endpoints import ENDPOINTS
from tokenmill.server.errors import STYLES, Fault, openai_style, style_of
from tokenmill.server.http import is_open
from tokenmill.server.openai import Rules
from tokenmill.server.tenants.settings import TenantSettings
from tokenmill.server.usage.question import FILTERS

DOCUMENT = Path(openapi.__file__).parent / "document.json"

BODIES = {
    "POST /v1/chat/completions": "chat",
    "POST /v1/completions": "completion",
    "POST /v1/responses": "response",
    "POST /v1/responses/input_tokens": "response",
    "POST /v1/embeddings": "embedding",
    "POST /v1/score": "score",
    "POST /v1/rerank": "rerank",
    "POST /tokenize": "tokenize",
    "POST /detokenize": "detokenize",
    "POST /api/chat": "ollama_chat",
    "POST /api/generate": "ollama_generate",
    "POST /api/embed": "ollama_embed",
    "POST /api/embeddings": "ollama_embeddings",
    "POST /completion": "llama_completion",
    "POST /infill": "llama_infill",
    "POST /embedding": "llama_embedding",
    "POST /inference/v1/generate": "ids",
    "POST /generate": "sglang",
    "POST /v1/messages": "messages",
    "POST /v1/messages/count_tokens": "count_tokens",
    "POST /v1/load_lora_adapter": "load_adapter",
    "POST /v1/unload_lora_adapter": "unload_adapter",
    "POST /v1/batches": "batch",
    "POST /v1/files": "upload",
    "POST /admin/tenants": "new_tenant",
    "PATCH /admin/tenants/{tenant}": "tenant",
    "POST /admin/keys": "new_key",
    "POST /admin/canaries": "canary",
    "POST /admin/models": "model",
    "POST /admin/keys/{key}/rotate": "rotation",
    "POST /admin/workers/{worker}/pool": "pool",
    "POST /admin/kv/find": "kv_prompt",
    "POST /admin/kv/pin": "kv_pin",
    "POST /admin/kv/unpin": "kv_prompt",
    "POST /admin/kv/drop": "kv_prompt",
    "POST /admin/kv/prefetch": "kv_prefetch",
    "POST /admin/kv/quota": "kv_quota",
    "POST /admin/kv/clear": "kv_clear",
    "POST /apply-template": "any",
    "POST /api/show": "any",
    "POST /api/pull": "any",
}
"""What the body of a route is; one that is not here has none."""
USAGE = ("start_time", "end_time", "bucket_width", "limit", "page", "group_by", *FILTERS)
QUERIES = {
    "GET /v1/requests/{id}/stream": ("after",),
    "GET /v1/files": ("purpose", "limit", "order", "after"),
    "GET /v1/batches": ("limit", "after"),
    "GET /v1/responses/{response_id}/input_items": ("limit", "order", "after"),
    "GET /admin/keys": ("tenant",),
    "GET /admin/kv/blocks": ("prefix", "tier", "limit"),
    "POST /admin/workers/{worker}/drain": ("restart",),
    "GET /admin/decisions": ("limit",),
    "GET /admin/requests": ("state", "limit", "tenant"),
    "GET /admin/flight": ("steps", "engine"),
    "GET /v1/usage": USAGE,
    "GET /admin/usage": USAGE,
    "GET /slots": ("fail_on_no_slot",),
}
_KEYS = {"name": ("string, not empty", "what people call it"), "tenant": ("string", "whose it is; else `name`'s"),
         "scopes": ("array of strings", '`[]` or `["admin"]`'),
         "expires_at": ("integer, 1 to 100000000000", "when it ends, in seconds since 1970")}  # fmt: skip
_MODEL = {
    "model": ("string, not empty", "alias, .gguf file, folder in Hugging Face format, or hub name"),
    "name": ("string", "that calls have as `model`; else `model`"),
    "kv_cache_memory_bytes": ("integer, 1 to 2^50", "its KV pool; else a share of what is left of memory"),
}
_CANARY = {
    "name": ("string, not empty", "that calls have as `model`"),
    "versions": ("array of objects", "`model` and `weight` of each, the stable one first"),
    "seed": ("integer, 0 to 2^31 - 1", "another one deals sessions to versions anew"),
    "ttft_ms": ("number, above 0, to 3600000", "target of calls; else the server's"),
    "tpot_ms": ("number, above 0, to 3600000", "the same"),
    "tolerance": ("number, 0 to 10", "by which share times of a canary may be longer (0.1)"),
    "alpha": ("number, above 0, to 0.5", "chance that a good canary is taken back, within 500 of its calls (0.01)"),
    "min_samples": ("integer, 1 to 500", "calls before that (5)"),
}
_POOL = {"pool": ("string, not empty", "its name: 1 to 32 of a-z, 0-9, hyphen and underscore")}
_ROTATION = {"overlap_s": ("number, 0 to 2592000", "for how long the old one still serves")}
_TEXTS = {"/metrics", "/metrics/workers", "/console", "/console/{path}", "/", "/v1/files/{file_id}/content", "/docs",
          "/v1/requests/{id}/stream", "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"}  # fmt: skip
_CREATED = {
    "POST /admin/models",
    "POST /admin/canaries",
    "POST /admin/tenants",
    "POST /admin/keys",
    "POST /admin/keys/{key}/rotate",
}
_ACCEPTED = {"POST /admin/workers/{worker}/drain"}
_OPTION_KINDS = {"str": "string", "int": "integer", "float": "number", "bool": "true or false"}
_LISTS = ("llama_completion", "llama_embedding", "sglang")
"""What they answer is a list where several answers are asked for."""
_ARRAYS = ("GET /slots", "GET /lora-adapters")
_LINES = ("ollama_chat", "ollama_generate")


def document() -> dict[str, Any]:
    routes = api_record.routes()
    assert BODIES.keys() <= routes, f"bodies of routes that are not there: {sorted(BODIES.keys() - routes)}"
    assert QUERIES.keys() <= routes
    paths: dict[str, dict[str, Any]] = {}
    for route in sorted(routes):
        method, path = route.split()
        paths.setdefault(path, {})[method.lower()] = _operation(route)
    styles = {style.__name__.removesuffix("_style"): style for style in (openai_style, *STYLES.values())}
    faults = [
        Fault(400, "what is wrong", "invalid_request_error"),
        Fault(400, "what is wrong", "invalid_request_error", "field", "code", "req_1"),
        Fault(503, "what is wrong", "unavailable_error", "field", 503, "req_1"),
    ]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tokenmill",
            "version": "",
            "summary": "Serves large language models by the APIs of OpenAI, Anthropic, Ollama, llama-server and vLLM.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {name: _body(name) for name in sorted({*BODIES.values()})}
            | {f"{name}_error": example_schema(*map(style, faults)) for name, style in sorted(styles.items())},
            "responses": {
                f"{name}_error": {
                    "description": "Refused, or failed.",
                    "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}_error"}}},
                }
                for name in sorted(styles)
            },
        },
    }


def _operation(route: str) -> dict[str, Any]:
    method, path = route.split()
    original = words.ALIASES.get(route, route)
    body = BODIES.get(route) or BODIES.get(original)
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": plain(words.ENDPOINTS[original]),
        "responses": _responses(route, original, body),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in QUERIES.get(route, ())]
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        kind = "multipart/form-data" if body == "upload" else "application/json"
        content = {"schema": {"$ref": f"#/components/schemas/{body}"}}
        operation["requestBody"] = {"required": body != "rotation", "content": {kind: content}}
    if is_open(path):
        operation["security"] = []
    return operation


def _responses(route: str, original: str, body: str | None) -> dict[str, Any]:
    path = route.split()[1]
    style = style_of(path).__name__.removesuffix("_style")
    kind = ["array", "object"] if body in _LISTS else "array" if route in _ARRAYS else "object"
    content: dict[str, Any] = {"application/json": {"schema": {"type": kind}}}
    if route in _TEXTS or path in _TEXTS:
        content = {"*/*": {}}
    if body in _LINES:
        content["application/x-ndjson"] = {}
    elif body in ENDPOINTS and "stream" in make_api_doc.found(body):
        content["text/event-stream"] = {}
    status = "201" if original in _CREATED else "202" if original in _ACCEPTED else "200"
    responses: dict[str, Any] = {status: {"description": "Done.", "content": content}}
    if path == "/console":
        responses = {"307": {"description": "Where its pages are."}}
    error = {"$ref": f"#/components/responses/{style}_error"}
    return responses | {"4XX": error, "5XX": error}


def _body(name: str) -> Schema:
    if name in ENDPOINTS:
        fields = make_api_doc.found(name)
        told = {field: text for part in make_api_doc.READ[name] for field, text in part.items()}
        kinds = {field: (make_api_doc._kind(field, kind), told[field]) for field, kind in fields.items()}
        return object_of(kinds, _required(name)) | {"examples": [api_record.BODIES[name][0]]}
    if name in ("tenant", "new_tenant"):
        fields = {
            each: (_OPTION_KINDS[kind], declared.help)
            for each, (declared, _, kind) in options_of(TenantSettings).items()
        }
        named = {"id": ("string, not empty", "its own for ever")}
        return object_of(named | fields, ["id"]) if name == "new_tenant" else object_of(fields, [])
    if name == "upload":
        parts = {
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            "purpose": {"const": "batch"},
        }
        return {"type": "object", "properties": parts, "required": ["file", "purpose"]}
    return {
        "load_adapter": lambda: _adapter(api_record.load_fields(), words.LOAD_ADAPTER, ["lora_name", "lora_path"]),
        "unload_adapter": lambda: _adapter(api_record.unload_fields(), words.UNLOAD_ADAPTER, ["lora_name"]),
        "new_key": lambda: object_of(_KEYS, ["name"]),
        "pool": lambda: object_of(_POOL, ["pool"]),
        "model": lambda: object_of(_MODEL, ["model"]),
        "canary": lambda: object_of(_CANARY, ["name", "versions"]),
        "rotation": lambda: object_of(_ROTATION, []),
        "batch": lambda: object_of(api_files.BATCH, ["input_file_id", "endpoint", "completion_window"]),
        **{name: partial(object_of, fields, []) for name, fields in api_kv.BODIES.items()},
        "any": lambda: {"type": "object"},
    }[name]()


def _adapter(read: dict[str, str], told: dict[str, str], required: list[str]) -> Schema:
    return object_of({field: (kind, told[field]) for field, kind in read.items()}, required)


def _required(endpoint: str) -> list[str]:
    """Fields without which every body that the endpoint takes is refused."""
    bodies = api_record.BODIES[endpoint]
    common = [name for name in bodies[0] if all(name in body for body in bodies)]
    found = []
    for name in common:
        body = copy.deepcopy(bodies[0])
        del body[name]
        try:
            ENDPOINTS[endpoint][0](body, Rules(vocab_size=10, fim=api_record._FIM))
        except InvalidRequest as error:
            if error.param in (name, None) or name in error.message:
                found.append(name)
    return found


def text() -> str:
    return json.dumps(document(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write() -> None:
    DOCUMENT.write_text(text(), encoding="utf8")


if __name__ == "__main__":
    write()
