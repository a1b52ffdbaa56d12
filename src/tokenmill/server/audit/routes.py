"""`GET /admin/audit`: where the audit log's head is, and whether it is written."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ...api.json_reply import JSONReply
from ...control.audit.log import AuditLog
from ...core.errors import NotFound
from ..scopes import require_operator


def audit_routes(log: AuditLog | None) -> list[Route]:
    async def show(request: HttpRequest) -> Response:
        require_operator(request)
        if log is None:
            raise NotFound("There is no audit log; start the server with --audit-log FILE.")
        return JSONReply(log.status())

    return [Route("/admin/audit", show)]
