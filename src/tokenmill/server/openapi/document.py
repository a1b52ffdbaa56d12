"""The OpenAPI document of this server: its paths and bodies, from the tables of words beside this file.

Which body a route takes, what its fields are, and examples that make its parser read all that it knows are here.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from ...api.endpoints import ENDPOINTS
from ...api.errors import STYLES, Fault, openai_style, style_of
from ...api.rules import Rules
from ...control.tenants.settings import TenantSettings
from ...core.errors import InvalidRequest
from ...core.options import options_of
from ...text.fim import FimTokens
from ..http import is_open
from . import fields, paths
from . import fields_of_others as others
from .fields import Told
from .schemas import Schema, example_schema, object_of, plain

BODIES = {
    "POST /v1/chat/completions": "chat",
    "POST /v1/completions": "completion",
    "POST /v1/responses": "response",
    "POST /v1/responses/input_tokens": "response",
    "POST /v1/conversations": "new_conversation",
    "POST /v1/conversations/{conversation_id}": "conversation",
    "POST /v1/conversations/{conversation_id}/items": "conversation_items",
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
    "POST /v1/messages/batches": "message_batch",
    "POST /v1/files": "upload",
    "POST /admin/tenants": "new_tenant",
    "PATCH /admin/tenants/{tenant}": "tenant",
    "POST /admin/keys": "new_key",
    "POST /admin/canaries": "canary",
    "POST /admin/models": "model",
    "POST /models/load": "listed_model",
    "POST /models/unload": "listed_model",
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
LISTS = ("llama_completion", "llama_embedding", "sglang")
"""What they answer is a list where several answers are asked for."""
LINES = ("ollama_chat", "ollama_generate")
READ: dict[str, tuple[Told, ...]] = {
    "chat": (fields.ANSWER, fields.SAMPLING, fields.CHAT),
    "completion": (fields.ANSWER, fields.SAMPLING, fields.COMPLETION),
    "embedding": (fields.POOLING, fields.EMBEDDING),
    "score": (fields.POOLING, fields.SCORE),
    "rerank": (fields.POOLING, fields.RERANK),
    "tokenize": (fields.TOKENIZE,),
    "detokenize": (fields.DETOKENIZE,),
    "ollama_chat": (others.OLLAMA_CHAT, others.OLLAMA_OPTIONS),
    "ollama_generate": (others.OLLAMA_GENERATE, others.OLLAMA_OPTIONS),
    "llama_completion": (others.LLAMA_COMPLETION,),
    "llama_infill": (others.LLAMA_INFILL,),
    "llama_embedding": (others.LLAMA_EMBEDDING,),
    "ollama_embed": (others.OLLAMA_EMBED, others.OLLAMA_OPTIONS),
    "ollama_embeddings": (others.OLLAMA_EMBEDDINGS, others.OLLAMA_OPTIONS),
    "response": (fields.ANSWER, fields.SAMPLING, fields.CHAT, fields.RESPONSE),
    "continued_response": (fields.ANSWER, fields.SAMPLING, fields.CHAT, fields.RESPONSE),
    "ids": (others.VLLM_IDS,),
    "sglang": (others.SGLANG_IDS,),
    "messages": (others.MESSAGES,),
    "count_tokens": (others.MESSAGES,),
}
"""What is said of the fields that a parser reads (api/endpoints.py)."""
_MESSAGES = [{"role": "user", "content": "hi"}]
_ANTHROPIC: list[dict[str, Any]] = [
    {
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
    },
    {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "context_management": {"edits": []}},
]
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "chat": [{"messages": _MESSAGES}],
    "completion": [{"prompt": "hi"}],
    "embedding": [{"input": "hi"}],
    "score": [{"text_1": "a", "text_2": "b"}, {"queries": "a", "documents": "b"}],
    "rerank": [{"query": "a", "documents": ["b"]}],
    "tokenize": [{"prompt": "hi"}, {"messages": _MESSAGES}, {"content": "hi"}],
    "response": [{"input": "hi"}],
    "continued_response": [{"body": {"input": "hi"}, "before": [], "known": {}}],
    "detokenize": [{"tokens": [1]}],
    "ollama_chat": [{"model": "toy", "messages": _MESSAGES}],
    "ollama_generate": [{"model": "toy", "prompt": "hi"}],
    "llama_completion": [{"prompt": "hi"}],
    "llama_infill": [{"input_prefix": "a", "input_suffix": "b"}],
    "llama_embedding": [{"content": "hi"}],
    "ollama_embed": [{"model": "toy", "input": "hi"}],
    "ollama_embeddings": [{"model": "toy", "prompt": "hi"}],
    "ids": [{"token_ids": [1]}],
    "sglang": [{"text": "hi"}],
    "messages": _ANTHROPIC,
    "count_tokens": _ANTHROPIC,
}
"""Bodies that make a parser read all that it knows; the first is shown."""


_FIM = FimTokens("a", "b", "c")
_OPTION_KINDS = {"str": "string", "int": "integer", "float": "number", "bool": "true or false"}
_OTHERS: dict[str, tuple[Told, list[str]]] = {
    "load_adapter": (fields.LOAD_ADAPTER, ["lora_name", "lora_path"]),
    "unload_adapter": (fields.UNLOAD_ADAPTER, ["lora_name"]),
    "new_key": (others.NEW_KEY, ["name"]),
    "pool": (others.POOL, ["pool"]),
    "model": (others.MODEL, ["model"]),
    "listed_model": (others.LISTED_MODEL, ["model"]),
    "canary": (others.CANARY, ["name", "versions"]),
    "rotation": (others.ROTATION, []),
    "batch": (others.BATCH, ["input_file_id", "endpoint", "completion_window"]),
    "message_batch": (others.MESSAGE_BATCH, ["requests"]),
    **others.CONVERSATIONS,
    **{name: (told_of, []) for name, told_of in others.KV.items()},
}
"""Bodies that no parser of api/endpoints.py reads, and what they must have."""


def told(endpoint: str) -> Told:
    """What is said of all the fields that a parser reads."""
    return {name: said for table in READ[endpoint] for name, said in table.items()}


def document() -> dict[str, Any]:
    operations: dict[str, dict[str, Any]] = {}
    for route in sorted(paths.ENDPOINTS.keys() | paths.ALIASES.keys()):
        method, path = route.split()
        operations.setdefault(path, {})[method.lower()] = _operation(route)
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
        "paths": operations,
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
    original = paths.ALIASES.get(route, route)
    body = BODIES.get(route) or BODIES.get(original)
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": plain(paths.ENDPOINTS[original]),
        "responses": _responses(route, original, body),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in paths.QUERIES.get(route, ())]
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
    kind = ["array", "object"] if body in LISTS else "array" if route in paths.ARRAYS else "object"
    content: dict[str, Any] = {"application/json": {"schema": {"type": kind}}}
    if route in paths.TEXTS or path in paths.TEXTS:
        content = {"*/*": {}}
    if body in LINES:
        content["application/x-ndjson"] = {}
    elif body in ENDPOINTS and "stream" in told(body):
        content["text/event-stream"] = {}
    status = "201" if original in paths.CREATED else "202" if original in paths.ACCEPTED else "200"
    responses: dict[str, Any] = {status: {"description": "Done.", "content": content}}
    if path == "/console":
        responses = {"307": {"description": "Where its pages are."}}
    error = {"$ref": f"#/components/responses/{style}_error"}
    return responses | {"4XX": error, "5XX": error}


def _body(name: str) -> Schema:
    if name in ENDPOINTS:
        return object_of(told(name), _required(name)) | {"examples": [EXAMPLES[name][0]]}
    if name in ("tenant", "new_tenant"):
        settings = {
            each: (_OPTION_KINDS[kind], declared.help)
            for each, (declared, _, kind) in options_of(TenantSettings).items()
        }
        named = {"id": ("string, not empty", "its own for ever")}
        return object_of(named | settings, ["id"]) if name == "new_tenant" else object_of(settings, [])
    if name == "upload":
        parts = {
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            "purpose": {"const": "batch"},
        }
        return {"type": "object", "properties": parts, "required": ["file", "purpose"]}
    if name == "any":
        return {"type": "object"}
    told_of, required = _OTHERS[name]
    return object_of(told_of, required)


def _required(endpoint: str) -> list[str]:
    """Fields without which every body that the endpoint takes is refused."""
    bodies = EXAMPLES[endpoint]
    common = [name for name in bodies[0] if all(name in body for body in bodies)]
    found = []
    for name in common:
        body = copy.deepcopy(bodies[0])
        del body[name]
        try:
            ENDPOINTS[endpoint][0](body, Rules(vocab_size=10, fim=_FIM))
        except InvalidRequest as error:
            if error.param in (name, None) or name in error.message:
                found.append(name)
    return found
