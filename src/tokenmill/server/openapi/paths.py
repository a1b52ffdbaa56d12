"""What every route means, in a line each, and what it takes and gives beside a body. See fields.py."""

from __future__ import annotations

from ...control.usage.question import FILTERS

_WHERE = "([kv-tiers.md](../operate/kv-tiers.md#operating-it))"
ENDPOINTS: dict[str, str] = {
    "POST /v1/chat/completions": "OpenAI's chat: messages in, one or more answers out, whole or as server-sent events. "
    "Also `/chat/completions`.",
    "POST /v1/completions": "OpenAI's text completion: prompts as text or token ids, also scored (`echo`).",
    "POST /v1/responses": "OpenAI's responses: items in, items out, whole or as events: [responses.md](responses.md).",
    "POST /v1/responses/input_tokens": "How many tokens the model would be given for such a body.",
    "GET /v1/responses/{response_id}": "One that is kept, or under way; or its events, by `stream` and "
    "`starting_after`, if it runs in the background.",
    "DELETE /v1/responses/{response_id}": "Forget it.",
    "POST /v1/responses/{response_id}/cancel": "End one that is under way.",
    "GET /v1/responses/{response_id}/input_items": "What the model was given, by `limit`, `order` and `after`.",
    "POST /v1/conversations": "OpenAI's: begin one, with `items` and `metadata` "
    "([responses.md](responses.md#conversations)).",
    "GET /v1/conversations/{conversation_id}": "One of the caller's.",
    "POST /v1/conversations/{conversation_id}": "Give it other `metadata`.",
    "DELETE /v1/conversations/{conversation_id}": "Forget it and its items.",
    "GET /v1/conversations/{conversation_id}/items": "Its items, by `limit`, `order` and `after`.",
    "POST /v1/conversations/{conversation_id}/items": "Put items behind its own.",
    "GET /v1/conversations/{conversation_id}/items/{item_id}": "One of them.",
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": "Take it out; the answer is the conversation.",
    "POST /v1/embeddings": "OpenAI's: a vector for each input. Where a model gives vectors.",
    "POST /v1/score": "vLLM's: how well pairs of texts go together. Also `/score`.",
    "POST /v1/rerank": "Jina's and Cohere's: documents in the order of their fit to a query. Also "
    "`/v2/rerank`, `/rerank`, `/v1/reranking`, `/reranking`.",
    "GET /v1/models": "The model's names, and the adapters that are loaded. Also `/models`.",
    "GET /v1/models/{name}": "One of them; 404 where there is none.",
    "POST /v1/load_lora_adapter": "vLLM's: load an adapter from a folder under `--lora-dir`.",
    "POST /v1/unload_lora_adapter": "vLLM's: forget one. Requests that use it run to their end.",
    "POST /tokenize": "vLLM's: the tokens of a text, or of a conversation.",
    "POST /detokenize": "vLLM's: the text of tokens.",
    "GET /tokenizer_info": "vLLM's: special tokens and the chat template; with `--enable-tokenizer-info-endpoint`.",
    "GET /health": "200 while an engine is ready and makes steps, else 503. Also `/v1/health`, and `/ping` by GET and "
    "POST.",
    "GET /load": "vLLM's: how many requests are open.",
    "GET /metrics": "Prometheus text, or OpenMetrics where the caller asks for it: "
    "[metrics.md](../operate/metrics.md).",
    "GET /admin/slo": "Profiles as this machine can hold them, and whose traffic resembles which: "
    "[slo.md](../operate/slo.md).",
    "GET /admin/load": "What the server does and how it did in the last minute: "
    "[operations.md](../operate/operations.md).",
    "GET /admin/workers": "The workers, and what each does: [workers.md](../operate/workers.md#who-works).",
    "POST /admin/workers/{worker}/drain": "Give it no more, and end it when it has finished what it has; "
    "`?restart=true`: another follows. From this machine, or with a key of scope admin.",
    "POST /admin/workers/{worker}/pool": "Put it into another `pool`. From this machine, or with a key of scope admin.",
    "GET /admin/requests": "Requests that are open and the last that ended: [operations.md](../operate/operations.md).",
    "GET /admin/requests/{id}": "One request and its timeline, by its id or its call's.",
    "GET /v1/usage": "What the caller's tenant has used, in OpenAI's form: [usage.md](../operate/usage.md).",
    "GET /admin/usage": "What all tenants have used.",
    "GET /admin/flight": "An engine's last steps as a trace for ui.perfetto.dev: "
    "[operations.md](../operate/operations.md).",
    "GET /admin/audit": "Where the head of the audit log is: [security.md](../operate/security.md#audit-log).",
    "GET /openapi.json": "This API as an OpenAPI 3.1 document. Needs no key.",
    "GET /docs": "The same as a page for people.",
    "GET /.well-known/jwks.json": "The public key of signed answers: "
    "[security.md](../operate/security.md#signed-answers).",
    "GET /version": "The version of this server.",
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
    "GET /v1/requests/{id}/stream": "The rest of a stream for a client that has lost it: `after`, the id of the last "
    "event it has ([resume.md](resume.md)).",
    "GET /metrics/workers": "Metrics of each worker, with labels `worker` and `pool` "
    "([metrics.md](../operate/metrics.md)).",
    "GET /admin/decisions": "What was decided about workers and moves of late: "
    "[operations.md](../operate/operations.md).",
    "GET /admin/tenants": "The tenants and what each may use: [tenants.md](../operate/tenants.md). As all of "
    "`/admin` it needs a "
    "key of scope admin where keys are asked for.",
    "POST /admin/tenants": "Make a tenant: `id` and settings.",
    "GET /admin/tenants/{tenant}": "One of them.",
    "PATCH /admin/tenants/{tenant}": "Change its settings, for requests from now on.",
    "DELETE /admin/tenants/{tenant}": "Delete it and revoke its keys.",
    "GET /admin/models": "The models beside this server's own, with their state: "
    "[many-models.md](../operate/many-models.md).",
    "POST /admin/models": "Load one: `model`, `name` and `kv_cache_memory_bytes`. The answer comes when it serves.",
    "DELETE /admin/models/{name}": "Unload it, once its open calls have ended, or after 30 s.",
    "POST /models/load": "llama-server's: have a model of `--models-dir` loaded (`model`). The answer comes when "
    "it is. As all that changes models it needs a key of scope admin where keys are asked for, else a call from this "
    "machine ([many-models.md](../operate/many-models.md#models-of-a-folder)).",
    "POST /models/unload": "llama-server's: have it unloaded, once its open calls have ended, or after 30 s.",
    "GET /admin/canaries": "Names that stand for versions of a model, what came of each version and why one was taken "
    "back: [many-models.md](../operate/many-models.md#versions-and-canaries).",
    "POST /admin/canaries": "Make one, or replace it: `name`, `versions` and how they are judged. As all that changes "
    "models it needs a key of scope admin where keys are asked for, else a call from this machine.",
    "DELETE /admin/canaries/{name}": "Forget it.",
    "GET /admin/keys": "The keys that were given out, without what they are (`tenant`).",
    "POST /admin/keys": "Make a key: `name`, `tenant`, `scopes`, `expires_at`. The answer alone has it, in `key`.",
    "GET /admin/keys/{key}": "One of them.",
    "DELETE /admin/keys/{key}": "Revoke it.",
    "POST /admin/keys/{key}/rotate": "Replace it; the old one ends `overlap_s` seconds from now (0).",
    "GET /console": "Pages for a browser: [console.md](../operate/console.md).",
    "GET /console/{path}": "Their files.",
    "GET /admin/kv": "Blocks of each engine's pools, and the largest prefixes in its cache "
    "([console.md](../operate/console.md)). "
    "Needs a key of scope admin where keys are given out.",
    "GET /admin/reports": "Results of benchmarks in `--reports-dir`, the latest first. Needs a key of scope admin "
    "where keys are given out.",
    "GET /admin/reports/{name}": "One of them, as it was written. The same.",
    "POST /v1/messages": "Anthropic's: messages in, one answer of content blocks out, whole or as events: "
    "[messages.md](messages.md).",
    "POST /v1/messages/count_tokens": "Anthropic's: how many tokens the prompt of such a call has.",
    "POST /v1/messages/batches": "Anthropic's: answer many such calls in the time that others leave "
    "([batches.md](batches.md#message-batches)).",
    "GET /v1/messages/batches": "Anthropic's: the caller's, the latest first, in pages (`limit`, `before_id`, "
    "`after_id`).",
    "GET /v1/messages/batches/{batch_id}": "Anthropic's: one of them, and how far it is.",
    "DELETE /v1/messages/batches/{batch_id}": "Anthropic's: forget one that has ended.",
    "POST /v1/messages/batches/{batch_id}/cancel": "Anthropic's: answer no more of its calls.",
    "GET /v1/messages/batches/{batch_id}/results": "Anthropic's: a line of JSON for each call of one that has ended.",
    "POST /v1/files": "OpenAI's: upload a file for a batch ([batches.md](batches.md)).",
    "GET /v1/files": "OpenAI's: the caller's files, in pages (`purpose`, `limit`, `order`, `after`).",
    "GET /v1/files/{file_id}": "OpenAI's: one of them.",
    "GET /v1/files/{file_id}/content": "OpenAI's: its bytes.",
    "DELETE /v1/files/{file_id}": "OpenAI's: delete it.",
    "POST /v1/batches": "OpenAI's: answer the calls in a file in the time that others leave.",
    "GET /v1/batches": "OpenAI's: the caller's batches, the latest first, in pages (`limit`, `after`).",
    "GET /v1/batches/{batch_id}": "OpenAI's: one of them, and how far it is.",
    "POST /v1/batches/{batch_id}/cancel": "OpenAI's: answer no more of its calls.",
    "GET /admin/kv/tiers": "What the KV store has in each tier, and what has passed through it "
    f"{_WHERE}. Needs a key of scope admin where keys are given out.",
    "GET /admin/kv/blocks": "The blocks themselves: `prefix` of their keys in hex, `tier`, `limit`. The same.",
    "POST /admin/kv/find": "How much of a prompt is stored, and where: the body of a request, of which nothing is "
    "computed. The same.",
    "POST /admin/kv/pin": "Keep the KV of a prompt whatever else is wanted, for `seconds` or for ever. As all below it "
    "needs a key of scope admin where keys are asked for, else a call from this machine.",
    "POST /admin/kv/unpin": "Let it go as any other.",
    "POST /admin/kv/drop": "Forget the KV of a prompt in every tier.",
    "POST /admin/kv/prefetch": "Bring what is stored of a prompt nearer before it is asked for: into host memory, or "
    "into an engine's pool ([ahead of time](../operate/kv-tiers.md#across-machines-and-the-router)).",
    "POST /admin/kv/quota": "Bound what one owner, or each other, may have in a tier.",
    "POST /admin/kv/fence": "Let no other machine write to the remote store from now on.",
    "POST /admin/kv/clear": "Forget what a tier has, or what an owner has, or everything.",
    "POST /inference/v1/generate": "vLLM's: token ids in, token ids out, without text.",
    "POST /generate": "SGLang's: text or token ids in, both out.",
}
ALIASES: dict[str, str] = {
    "POST /score": "POST /v1/score",
    "POST /v2/rerank": "POST /v1/rerank",
    "POST /rerank": "POST /v1/rerank",
    "POST /v1/reranking": "POST /v1/rerank",
    "POST /reranking": "POST /v1/rerank",
    "POST /chat/completions": "POST /v1/chat/completions",
    "GET /models": "GET /v1/models",
    "GET /ping": "GET /health",
    "POST /ping": "GET /health",
    **{
        f"{method} {path}": "POST /api/push"
        for method, path in (
            ("POST", "/api/create"),
            ("POST", "/api/copy"),
            ("POST", "/api/delete"),
            ("DELETE", "/api/delete"),
            ("POST", "/api/blobs/{digest}"),
            ("GET", "/api/blobs/{digest}"),
        )
    },
    "POST /completions": "POST /completion",
    "POST /embeddings": "POST /embedding",
    "GET /v1/health": "GET /health",
}
"""Further names of routes, and whose."""
_USAGE = ("start_time", "end_time", "bucket_width", "limit", "page", "group_by", *FILTERS)
QUERIES: dict[str, tuple[str, ...]] = {
    "GET /v1/requests/{id}/stream": ("after",),
    "GET /v1/files": ("purpose", "limit", "order", "after"),
    "GET /v1/batches": ("limit", "after"),
    "GET /v1/messages/batches": ("limit", "before_id", "after_id"),
    "GET /v1/responses/{response_id}": ("stream", "starting_after", "include"),
    "GET /v1/conversations/{conversation_id}/items": ("limit", "order", "after"),
    "GET /v1/responses/{response_id}/input_items": ("limit", "order", "after"),
    "GET /admin/keys": ("tenant",),
    "GET /admin/kv/blocks": ("prefix", "tier", "limit"),
    "POST /admin/workers/{worker}/drain": ("restart",),
    "GET /admin/decisions": ("limit",),
    "GET /admin/requests": ("state", "limit", "tenant"),
    "GET /admin/flight": ("steps", "engine"),
    "GET /v1/usage": _USAGE,
    "GET /admin/usage": _USAGE,
    "GET /slots": ("fail_on_no_slot",),
}
"""Parameters of queries."""
TEXTS = {
    "/metrics",
    "/metrics/workers",
    "/console",
    "/console/{path}",
    "/",
    "/v1/files/{file_id}/content",
    "/v1/messages/batches/{batch_id}/results",
    "/docs",
    "/v1/requests/{id}/stream",
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
}
"""Paths and routes that answer something else than JSON."""
CREATED = {
    "POST /admin/models",
    "POST /admin/canaries",
    "POST /admin/tenants",
    "POST /admin/keys",
    "POST /admin/keys/{key}/rotate",
}
ACCEPTED = {"POST /admin/workers/{worker}/drain"}
ARRAYS = ("GET /slots", "GET /lora-adapters")
