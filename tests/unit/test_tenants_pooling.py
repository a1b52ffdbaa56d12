"""Requests for vectors are their tenant's, as those for texts are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from tokenmill.api.pooling import PoolingCall
from tokenmill.api.sandbox import Caller
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.events import Ready
from tokenmill.core.request import PoolingParams, Request
from tokenmill.core.tenant import Tenant
from tokenmill.core.terms import Terms
from tokenmill.server.vectors import VectorService

READY = Ready("toy", 512, 100, (), "n", 16, 8, pooling=PoolingParams("last"), vector_size=4)


def requests(tenant: Tenant, **asked: Any) -> Sequence[Request]:
    """Of a call of the tenant's."""
    client, limits = MagicMock(), MagicMock(take_quota=AsyncMock())
    service = VectorService(*[MagicMock()] * 2, client, *[MagicMock()] * 3, limits, *[MagicMock()] * 3)  # type: ignore[arg-type]
    call = PoolingCall(model=None, inputs=((1, 2),), **asked)
    caller = Caller("n", None, tenant)
    asyncio.run(service._reply(call, [((1, 2), 0)], PoolingParams("last"), READY, {"id": "x"}, 0.0, caller, dict))
    found: Sequence[Request] = client.open.call_args[0][0]
    return found


def test_vectors_are_computed_on_their_tenants_terms_and_salt() -> None:
    tenant = Tenant("a", "a", Terms("a", 1, 2.0), "salt")
    (request,) = requests(tenant)
    assert (request.terms, request.cache_salt) == (tenant.terms, tenant.salt_with(""))
    (request,) = requests(tenant, cache_salt="mine", priority_class=2)
    assert request.cache_salt == tenant.salt_with("mine") and request.terms == Terms("a", 2, 2.0)
    assert requests(Tenant(), cache_salt="mine")[0].cache_salt == "mine"
    with pytest.raises(InvalidRequest, match="priority_class must be from 1"):
        requests(tenant, priority_class=0)
