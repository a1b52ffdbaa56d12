"""What the endpoints of KV tiers mean, in a line each, for docs/api.md, and the fields of their bodies."""

from __future__ import annotations

_WHERE = "([kv-tiers.md](kv-tiers.md#operating-it))"
ENDPOINTS = {
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
    "into an engine's pool ([ahead of time](kv-tiers.md#across-machines-and-the-router)).",
    "POST /admin/kv/quota": "Bound what one owner, or each other, may have in a tier.",
    "POST /admin/kv/fence": "Let no other machine write to the remote store from now on.",
    "POST /admin/kv/clear": "Forget what a tier has, or what an owner has, or everything.",
}
_OWNER = {
    "tenant": ("string", "the id of a tenant; else of the caller's"),
    "owner": ("string", "the `cache_salt` of requests, where there are no tenants"),
}
_PROMPT = {
    "messages": ("array of objects", "a conversation; a lone system message stands for all that begin with it"),
    "prompt": ("string or array", "a text, or token ids, instead"),
    "model": ("string", "an adapter's name, or the model's"),
    "cache_salt": ("string", "as requests have it"),
    "tenant": ("string", "the id of the tenant whose requests are meant; else the caller's"),
}
BODIES = {
    "kv_prompt": _PROMPT,
    "kv_pin": _PROMPT | {"seconds": ("number, above 0, to 1000000000", "for how long; else for ever")},
    "kv_prefetch": _PROMPT
    | {
        "to": ("string", "`host` (default): host memory of the KV store, not waited for; `pool`: an engine's pool"),
        "worker": ("string", "id of the engine; else the one to which it is least work"),
    },
    "kv_quota": _OWNER | {"bytes": ("integer, 0 to 4611686018427387904", "in each tier; null: no bound")},
    "kv_clear": _OWNER | {"tier": ("string", "`host`, `disk`, `remote` or `peer`; else all of them")},
}
