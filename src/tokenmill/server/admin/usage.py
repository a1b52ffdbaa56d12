"""Who asks what has been used: a tenant for itself, and who runs the server for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ...api.json_reply import JSONReply
from ...control.usage.accounting import Accounting
from ...control.usage.question import page, read_question
from ...core.errors import NotFound
from ..scopes import require_operator


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
