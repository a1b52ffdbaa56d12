"""/admin/tenants and /admin/keys: what `tokenmill tenants` and `tokenmill keys` do, over HTTP and without a restart;
and what has been used, which a tenant asks for itself at /v1/usage, and whoever runs the server for all at
/admin/usage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ...api.fields import Fields
from ...api.json_reply import JSONReply
from ...api.sandbox import parse_small
from ...control.tenants.access import Access
from ...control.tenants.keys import KeyRecord
from ...control.tenants.settings import TenantSettings
from ...control.tenants.store import TenantStore
from ...control.usage.accounting import Accounting
from ...control.usage.question import page, read_question
from ...core.errors import ConfigError, InvalidRequest, NotFound
from ...core.tenant import ADMIN
from ..callers import require_admin, require_operator
from ..limits import Limits


def usage_routes(accounting: Accounting | None, wall_s: Callable[[], float]) -> list[Route]:
    """`accounting`: open while the application serves; None: nothing is counted."""

    async def answer(request: HttpRequest, tenant: str | None) -> Response:
        if accounting is None:
            raise NotFound("This server keeps no account of usage; start it with --usage-dir DIR.")

        def values_of(name: str) -> Sequence[str]:
            query = request.query_params
            return [*query.getlist(name), *query.getlist(name + "[]")]

        question = read_question(values_of, wall_s(), all_tenants=tenant is None)
        if tenant is not None:
            question = question._replace(wanted=(*question.wanted, ("tenant", (tenant,))))
        return JSONReply(page(question, await accounting.ask(question)))

    async def own(request: HttpRequest) -> Response:
        return await answer(request, request.state.tenant.id)

    async def everyones(request: HttpRequest) -> Response:
        require_operator(request)
        return await answer(request, None)

    return [
        Route("/v1/usage", own, methods=["GET"]),
        Route("/admin/usage", everyones, methods=["GET"]),
    ]


MAX_OVERLAP_S = 30 * 24 * 3600
_MAX_TIME_S = 10**11
_SETTINGS = tuple(TenantSettings.__dataclass_fields__)

T = TypeVar("T")


def routes(access: Access, limits: Limits) -> list[Route]:
    service = _Admin(access, limits)
    return [
        Route("/admin/tenants", service.tenants, methods=["GET"]),
        Route("/admin/tenants", service.create_tenant, methods=["POST"]),
        Route("/admin/tenants/{tenant}", service.tenant, methods=["GET"]),
        Route("/admin/tenants/{tenant}", service.change_tenant, methods=["PATCH"]),
        Route("/admin/tenants/{tenant}", service.delete_tenant, methods=["DELETE"]),
        Route("/admin/keys", service.keys, methods=["GET"]),
        Route("/admin/keys", service.create_key, methods=["POST"]),
        Route("/admin/keys/{key}", service.key, methods=["GET"]),
        Route("/admin/keys/{key}", service.revoke_key, methods=["DELETE"]),
        Route("/admin/keys/{key}/rotate", service.rotate_key, methods=["POST"]),
    ]


class _Admin:
    def __init__(self, access: Access, limits: Limits) -> None:
        self._access = access
        self._limits = limits

    # ---- tenants ----

    async def tenants(self, request: HttpRequest) -> Response:
        require_operator(request)
        found = await self._do(lambda store: store.tenants())
        return JSONReply({"object": "list", "data": [tenant.to_json() for tenant in found]})

    async def tenant(self, request: HttpRequest) -> Response:
        require_operator(request)
        name = request.path_params["tenant"]
        return JSONReply((await self._do(lambda store: store.tenant(name))).to_json())

    async def create_tenant(self, request: HttpRequest) -> Response:
        fields = await self._fields(request)
        name, given = fields.required_text("id"), _settings(fields)
        fields.refuse_unread()
        made = await self._do(lambda store: store.create_tenant(name, TenantSettings.from_fields(given)))
        return JSONReply(made.to_json(), status_code=201)

    async def change_tenant(self, request: HttpRequest) -> Response:
        fields = await self._fields(request)
        name, given = request.path_params["tenant"], _settings(fields)
        fields.refuse_unread()
        return JSONReply((await self._do(lambda store: store.change_tenant(name, given))).to_json())

    async def delete_tenant(self, request: HttpRequest) -> Response:
        require_admin(request)
        name = request.path_params["tenant"]
        num_keys = await self._do(lambda store: store.delete_tenant(name))
        return JSONReply({"object": "tenant.deleted", "id": name, "deleted": True, "keys_revoked": num_keys})

    # ---- keys ----

    async def keys(self, request: HttpRequest) -> Response:
        require_operator(request)
        tenant = request.query_params.get("tenant")
        found = await self._do(lambda store: store.all_keys(tenant))
        used = await self._used()
        return JSONReply({"object": "list", "data": [self._shown(key, used) for key in found]})

    async def key(self, request: HttpRequest) -> Response:
        require_operator(request)
        name = request.path_params["key"]
        found = [key for key in await self._do(lambda store: store.all_keys()) if key.id == name]
        if not found:
            raise NotFound(f"There is no key {name[:100]!r}.", param="key")
        return JSONReply(self._shown(found[0], await self._used()))

    async def create_key(self, request: HttpRequest) -> Response:
        fields = await self._fields(request)
        name, tenant = fields.required_text("name"), fields.text("tenant")
        scopes = fields.array("scopes") or []
        if any(scope != ADMIN for scope in scopes):
            raise InvalidRequest('scopes may be [] or ["admin"].', param="scopes")
        expires_s = fields.integer("expires_at", 1, _MAX_TIME_S) or 0
        fields.refuse_unread()
        record, key = await self._do(
            lambda store: store.create_key(name, tenant or name, is_admin=bool(scopes), expires_s=expires_s)
        )
        return JSONReply({**self._shown(record), "key": key}, status_code=201)

    async def rotate_key(self, request: HttpRequest) -> Response:
        fields = await self._fields(request)
        overlap_s = fields.number("overlap_s") or 0.0
        if not 0 <= overlap_s <= MAX_OVERLAP_S:
            raise InvalidRequest(f"overlap_s must be between 0 and {MAX_OVERLAP_S}.", param="overlap_s")
        fields.refuse_unread()
        name = request.path_params["key"]
        record, key = await self._do(lambda store: store.rotate_key(name, overlap_s))
        return JSONReply({**self._shown(record), "key": key}, status_code=201)

    async def revoke_key(self, request: HttpRequest) -> Response:
        require_admin(request)
        name = request.path_params["key"]
        return JSONReply(self._shown((await self._do(lambda store: store.revoke_keys(name)))[0]))

    # ---- shared ----

    async def _fields(self, request: HttpRequest) -> Fields:
        """Of a body, which may be empty."""
        require_admin(request)
        async with self._limits.body(request) as data:
            return Fields(parse_small(data or b"{}"))

    async def _do(self, job: Callable[[TenantStore], T]) -> T:
        if not self._access.has_store:
            raise NotFound("This server keeps no tenants and gives out no keys; start it with --tenants FILE.")
        try:
            return await self._access.do(job)
        except ConfigError as error:
            raise InvalidRequest(error.message.removeprefix("--"), param=error.param) from None

    async def _used(self) -> dict[str, float]:
        return {} if self._access.quotas is None else await self._access.quotas.used()

    def _shown(self, key: KeyRecord, used: Mapping[str, float] = MappingProxyType({})) -> dict[str, Any]:
        """used: when keys were last used, by id."""
        return replace(key, used_s=used.get(key.id, 0.0)).to_json(time.time())


def _settings(fields: Fields) -> dict[str, Any]:
    """Those that the body names; null sets one back to what is usual."""
    values, given = {name: fields.any(name) for name in _SETTINGS}, fields.names()
    return {name: value for name, value in values.items() if name in given}
