"""What each endpoint and field of Ollama's and of llama-server's own APIs means, in a line each, for docs/api.md."""

from __future__ import annotations

ENDPOINTS = {
    "GET /": "Ollama's: somebody is there. Needs no key.",
    "POST /api/chat": "Ollama's chat: messages in, an answer out, as lines of JSON unless `stream` is false.",
    "POST /api/generate": "Ollama's: a prompt in, put in the model's template unless it is `raw`.",
    "POST /api/embed": "Ollama's: a vector of length 1 for each text. Where a model gives vectors.",
    "POST /api/embeddings": "Ollama's older one: a single vector, as the model gives it.",
    "GET /api/version": "The version of Ollama whose API is spoken.",
    "GET /api/tags": "Ollama's: the model's names, and adapters, with the tag `latest` where they have none.",
    "GET /api/ps": "Ollama's: the same while an engine is ready, with context and memory.",
    "POST /api/show": "Ollama's: architecture, size, context, template and capabilities.",
    "POST /api/pull": "Ollama's: success for a model that is served, else a 400.",
    "POST /api/push": "Ollama's: refused; models are not managed over HTTP. Also `/api/create`, `/api/copy`, "
    "`/api/delete`, `/api/blobs/{digest}`.",
    "POST /completion": "llama-server's: prompts as text, token ids or both mixed. Also `/completions`.",
    "POST /infill": "llama-server's: what belongs between two texts, where the model has tokens for that.",
    "POST /apply-template": "llama-server's: a conversation as the prompt that the model's template makes of it.",
    "POST /embedding": "llama-server's: vectors in its shape. Also `/embeddings`.",
    "GET /props": "llama-server's: default settings, context, slots, template.",
    "POST /props": "llama-server's: refused; the server's properties are settled when it starts.",
    "GET /slots": "llama-server's: how many rows a step may have, and how many are in use.",
    "GET /lora-adapters": "llama-server's: the adapters that are loaded; each is asked for by its name as the model.",
    "POST /lora-adapters": "llama-server's: refused; adapters act where their name is the model.",
}
ALIASES = {
    f"{method} {path}": "POST /api/push"
    for method, path in (
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/delete"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/{digest}"),
        ("GET", "/api/blobs/{digest}"),
    )
} | {
    "POST /completions": "POST /completion",
    "POST /embeddings": "POST /embedding",
    "GET /v1/health": "GET /health",
}

_BOTH = {
    "model": "the model or an adapter by its name, with or without the tag `latest`",
    "stream": "answer line by line (default: true)",
    "options": "settings, below",
    "format": "`json`, or a JSON schema that the answer is to fit; objects have the properties that they list, and no "
    "others unless `additionalProperties` allows them",
    "think": "whether the model thinks before it answers, or how hard: `low`, `medium`, `high`, `max`",
    "logprobs": "log probabilities of the answer's tokens",
    "top_logprobs": "and so many alternatives to each",
}
CHAT = _BOTH | {
    "messages": "the conversation; none: the answer says that the model is loaded. One that ends with the "
    "assistant's words is continued",
    "tools": "what the model may call",
}
GENERATE = _BOTH | {
    "prompt": "put in the model's template; none: the answer says that the model is loaded",
    "system": "a message before it",
    "raw": "the prompt is taken as it is",
    "suffix": "the answer fills the gap before it; where the model has tokens for that",
    "context": "tokens of an earlier answer's `context`, to go on with",
}
_VECTORS = {
    "model": "the model by its name, with or without the tag `latest`",
    "options": "checked like those of chat; none has an effect on vectors",
}
EMBED = _VECTORS | {
    "input": "one text or several; none: no vectors",
    "truncate": "cut texts that are too long (default: true)",
    "dimensions": "keep so many values of each vector",
}
EMBEDDINGS = _VECTORS | {"prompt": "the text; none: no vector"}
OPTIONS = {
    "options.num_predict": "most tokens of the answer; 0, -1, -2 or none: what the context has room for",
    "options.num_ctx": "of no effect: the context is settled when the server starts",
    "options.temperature": "as `temperature`",
    "options.top_k": "as `top_k`",
    "options.top_p": "as `top_p`",
    "options.min_p": "as `min_p`",
    "options.typical_p": "as `typical_p`",
    "options.seed": "as `seed`; -1: none",
    "options.stop": "as `stop`",
    "options.repeat_penalty": "as `repetition_penalty`",
    "options.repeat_last_n": "as `repeat_last_n`",
    "options.presence_penalty": "as `presence_penalty`",
    "options.frequency_penalty": "as `frequency_penalty`",
}
LLAMA_SHARED = {
    "n_predict": "most tokens of the answer; 0: none, the prompt is but read; -1, -2 or none: what the context has "
    "room for",
    "n_cmpl": "answers to each prompt",
    "n_probs": "log probabilities of the answer's tokens, with so many alternatives to each",
    "logit_bias": "pairs of token id and bias, false for never; or an object as in `/v1/completions`",
    "seed": "as there; -1 and 4294967295: none",
    "samplers": "which act; what is left out is off. Their order is fixed: another is refused where it would matter",
    "return_tokens": "the answer carries its token ids",
    "response_fields": "the last event, or the body, has only these; `a/b` is `b` of `a`",
    "timings_per_token": "every event tells times",
}
LLAMA_COMPLETION = {
    "prompt": "a text, token ids, both mixed in one array, an object with `prompt_string`; or an array of these"
} | LLAMA_SHARED
LLAMA_INFILL = {
    "input_prefix": "what comes before the gap",
    "input_suffix": "what comes after it",
    "input_extra": "other files: objects with `filename` and `text`",
    "prompt": "how the gap's text begins",
} | LLAMA_SHARED
LLAMA_EMBEDDING = {
    "content": "a text, token ids, or an array of these",
    "input": "the same under OpenAI's name",
    "embd_normalize": "2: vectors of length 1 (default); -1: as the model gives them",
}
KINDS = {
    "logit_bias": "array of pairs, or object",
    "seed": "integer",
    "samplers": "array of strings",
    "response_fields": "array of strings",
    "input_extra": "array of objects",
    "content": "string or array",
    "format": "string or object",
    "think": "true or false or string",
    "context": "array of integers",
    "options.num_predict": "integer, -2 to 2^31 - 1",
    "options.temperature": "number",
    "options.top_k": "integer",
    "options.top_p": "number",
    "options.min_p": "number",
    "options.typical_p": "number",
    "options.seed": "integer",
    "options.stop": "string or array of strings",
    "options.repeat_penalty": "number",
    "options.repeat_last_n": "integer",
    "options.presence_penalty": "number",
    "options.frequency_penalty": "number",
}
