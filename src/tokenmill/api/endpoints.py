"""Every body that is read: by which parser, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.errors import InvalidRequest
from .call import Call
from .ids.parse import parse_sglang, parse_vllm
from .llama.parse import parse_llama_completion, parse_llama_embedding, parse_llama_infill
from .messages.parse import parse_count, parse_messages
from .ollama.parse import parse_embed, parse_embeddings, parse_ollama_chat, parse_ollama_generate
from .openai.parse import parse_chat, parse_completion
from .openai.tokenize import DetokenizeCall, TokenizeCall, parse_detokenize, parse_tokenize
from .pooling import PoolingCall, parse_embedding, parse_rerank, parse_score
from .responses.parse import parse_continued, parse_response
from .rules import Rules

AnyCall = Call | PoolingCall | TokenizeCall | DetokenizeCall
Parse = Callable[[dict[str, Any], Rules], tuple[Any, list[str]]]

ENDPOINTS: dict[str, tuple[Parse, type[AnyCall], str]] = {
    "chat": (parse_chat, Call, "prompts"),
    "completion": (parse_completion, Call, "prompts"),
    "ollama_chat": (parse_ollama_chat, Call, "prompts"),
    "ollama_generate": (parse_ollama_generate, Call, "prompts"),
    "ollama_embed": (parse_embed, PoolingCall, "inputs"),
    "ollama_embeddings": (parse_embeddings, PoolingCall, "inputs"),
    "response": (parse_response, Call, "prompts"),
    "continued_response": (parse_continued, Call, "prompts"),
    "messages": (parse_messages, Call, "prompts"),
    "count_tokens": (parse_count, Call, "prompts"),
    "llama_completion": (parse_llama_completion, Call, "prompts"),
    "llama_infill": (parse_llama_infill, Call, "prompts"),
    "llama_embedding": (parse_llama_embedding, PoolingCall, "inputs"),
    "ids": (parse_vllm, Call, "prompts"),
    "sglang": (parse_sglang, Call, "prompts"),
    "embedding": (parse_embedding, PoolingCall, "inputs"),
    "score": (parse_score, PoolingCall, "inputs"),
    "rerank": (parse_rerank, PoolingCall, "inputs"),
    "tokenize": (parse_tokenize, TokenizeCall, "prompts"),
    "detokenize": (parse_detokenize, DetokenizeCall, "prompts"),
}
"""How a body is read, what it becomes, and which field of that holds texts and token ids."""


def parse_body(endpoint: str, body: dict[str, Any], rules: Rules) -> tuple[Any, list[str]]:
    """(the call, the names of unknown fields). Raises InvalidRequest naming the field."""
    try:
        return ENDPOINTS[endpoint][0](body, rules)
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
