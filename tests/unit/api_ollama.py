"""What each endpoint and field of Ollama's and of llama-server's own APIs means, in a line each, for docs/api.md."""

from __future__ import annotations

ENDPOINTS = {
    "GET /": "Ollama's: somebody is there. Needs no key.",
    "GET /api/version": "The version of Ollama whose API is spoken.",
    "GET /api/tags": "Ollama's: the model's names, and adapters, with the tag `latest` where they have none.",
    "GET /api/ps": "Ollama's: the same while an engine is ready, with context and memory.",
    "POST /api/show": "Ollama's: architecture, size, context, template and capabilities.",
    "POST /api/pull": "Ollama's: success for a model that is served, else a 400.",
    "POST /api/push": "Ollama's: refused; models are not managed over HTTP. Also `/api/create`, `/api/copy`, "
    "`/api/delete`, `/api/blobs/{digest}`.",
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
}
