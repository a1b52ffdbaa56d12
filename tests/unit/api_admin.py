"""What each endpoint of those who run a server means, in a line each, for docs/api.md."""

from __future__ import annotations

from collections.abc import Iterator

from api_tables import code, table

from tokenmill.core.options import options_of
from tokenmill.server.tenants.settings import TenantSettings

ENDPOINTS = {
    "GET /v1/requests/{id}/stream": "The rest of a stream for a client that has lost it: `after`, the id of the last "
    "event it has ([resume.md](resume.md)).",
    "GET /metrics/workers": "Metrics of each worker, with labels `worker` and `pool` ([metrics.md](metrics.md)).",
    "GET /admin/decisions": "What was decided about workers and moves of late: [operations.md](operations.md).",
    "GET /admin/tenants": "The tenants and what each may use: [tenants.md](tenants.md). As all of `/admin` it needs a "
    "key of scope admin where keys are asked for.",
    "POST /admin/tenants": "Make a tenant: `id` and settings.",
    "GET /admin/tenants/{tenant}": "One of them.",
    "PATCH /admin/tenants/{tenant}": "Change its settings, for requests from now on.",
    "DELETE /admin/tenants/{tenant}": "Delete it and revoke its keys.",
    "GET /admin/models": "The models beside this server's own, with their state: [many-models.md](many-models.md).",
    "POST /admin/models": "Load one: `model`, `name` and `kv_cache_memory_bytes`. The answer comes when it serves.",
    "DELETE /admin/models/{name}": "Unload it, once its open calls have ended, or after 30 s.",
    "GET /admin/canaries": "Names that stand for versions of a model, what came of each version and why one was taken "
    "back: [many-models.md](many-models.md#versions-and-canaries).",
    "POST /admin/canaries": "Make one, or replace it: `name`, `versions` and how they are judged. As all that changes "
    "models it needs a key of scope admin where keys are asked for, else a call from this machine.",
    "DELETE /admin/canaries/{name}": "Forget it.",
    "GET /admin/keys": "The keys that were given out, without what they are (`tenant`).",
    "POST /admin/keys": "Make a key: `name`, `tenant`, `scopes`, `expires_at`. The answer alone has it, in `key`.",
    "GET /admin/keys/{key}": "One of them.",
    "DELETE /admin/keys/{key}": "Revoke it.",
    "POST /admin/keys/{key}/rotate": "Replace it; the old one ends `overlap_s` seconds from now (0).",
}


def settings() -> Iterator[str]:
    """Of a tenant."""
    yield "### `/admin/tenants`"
    yield "The settings of a tenant, which are also flags of `tokenmill tenants create` and `tokenmill tenants set`:"
    rows = ((code(name), kind, declared.help) for name, (declared, _, kind) in options_of(TenantSettings).items())
    yield from table("field", "kind", "meaning", rows=rows)
