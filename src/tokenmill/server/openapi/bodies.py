"""Which body a route takes, what its fields are, and examples that make its parser read all that it knows."""

from __future__ import annotations

from typing import Any

from . import fields
from . import fields_of_others as others
from .fields import Told

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
