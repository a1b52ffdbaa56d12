"""What docs/use/api.md says of errors, of paths that are not there and of flags that the help leaves out.

Routes and fields have their words in src/tokenmill/server/openapi, flags in their declarations.
"""

from __future__ import annotations

NOT_HERE = {
    "/v1/audio/, /v1/images/, /v1/moderations, /v1/realtime": "OpenAI's: text and vectors alone are served",
    "/pooling, /classify": "vLLM's: use /v1/embeddings and /v1/score",
}

ERRORS = {
    "InvalidRequest": "A field is missing, of the wrong kind, out of range or not supported (`param` names it), or the "
    "body is not a JSON object.",
    "ContextTooLong": "The prompt, or the prompt and `max_tokens`, are more than the context.",
    "KeyReused": "The `Idempotency-Key` has been used for another call: [idempotency.md](idempotency.md).",
    "AuthenticationFailed": "No valid key; with `WWW-Authenticate: Bearer`.",
    "Forbidden": "A web page that may not call, or a Host that is not this server's: "
    "[http.md](../operate/http.md#web-pages).",
    "ModelNotFound": "No model or adapter has this name.",
    "NotFound": "Nothing is kept under this id, or not any more, or it is another key's.",
    "PreviousResponseNotFound": "The same of `previous_response_id`, or of a response that it goes on from.",
    "RequestTimeout": "The request took longer than it may, and has no token yet: "
    "[overload.md](../operate/overload.md).",
    "BodyTooLarge": "Of more than `--max-body-bytes`.",
    "UnsupportedEncoding": "A `Content-Encoding` other than gzip and deflate.",
    "RateLimited": "The caller has used up what its tenant may, with `Retry-After` and `x-ratelimit-*` "
    "([tenants](../operate/tenants.md)).",
    "Overloaded": "The wait would be longer than `--max-queue-s`, a target would be missed, or too much is "
    "open or held: [overload.md](../operate/overload.md). `Retry-After` says when there will be room.",
    "EngineFailed": "A step failed, or a bug, with its traceback in the log; or engines died of the request again and "
    "again.",
    "UpstreamFailed": "A server that answers for the model ([many-models.md](../operate/many-models.md)) gave no "
    "whole answer.",
    "Unavailable": "The engine starts, has died or stalls, or the server drains. While the engine is restarted "
    "`Retry-After` says when it will be back.",
}
"""Expected failures, by the name of their class."""
HTTP_ERRORS = {
    400: "Not HTTP/1.1 or 1.0, no Host, or a target that is no path.",
    404: "No such path.",
    405: "The path has no such method, or the request is one to a proxy.",
    408: "Head or body did not arrive in time.",
    414: "A target of more than 16 KiB.",
    431: "Headers of more than 64 KiB or 100 lines.",
    503: "Too many connections, or heads that hold too much; with `Retry-After: 1`.",
    505: "Another version of HTTP.",
}
"""Of what speaks HTTP, all of one shape."""
HIDDEN = {"--disable-log-requests": ("--no-enable-log-requests",)}
"""Flags of ours that the help leaves out, and what they are."""
