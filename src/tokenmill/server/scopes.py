"""What a caller may do beside generating. The gate has put the scopes of its key in `scope["state"]["scopes"]`."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest

from ..core.errors import Forbidden
from ..core.tenant import ADAPTERS, ADMIN, OPERATOR
from .listen import is_loopback


def require_admin(request: HttpRequest) -> None:
    """For what changes tenants, keys or the server. Raises Forbidden."""
    if ADMIN not in request.state.scopes:
        if OPERATOR in request.state.scopes:  # no keys are asked for
            raise Forbidden(
                "Where no API keys are asked for, the command line alone manages tenants and keys: "
                "tokenmill keys create NAME --admin"
            )
        raise Forbidden("This needs an API key of scope admin. Make one with: tokenmill keys create NAME --admin")


def require_local_admin(request: HttpRequest) -> None:
    """For what changes the server's work for all. Where no keys are asked for, callers of this machine may. Raises
    Forbidden."""
    scopes, peer = request.state.scopes, request.client
    if ADMIN in scopes:
        return
    if OPERATOR not in scopes:
        raise Forbidden("This needs an API key of scope admin.")
    if peer is not None and (not is_loopback(peer.host) or "x-forwarded-for" in request.headers):
        raise Forbidden("Where no API keys are asked for, only this machine's own callers may do this.")


def require_operator(request: HttpRequest) -> None:
    """For what shows the server's work and changes nothing. Raises Forbidden."""
    if OPERATOR not in request.state.scopes:
        raise Forbidden("This needs an API key of scope admin.")


def require_adapters(request: HttpRequest) -> None:
    """For what loads or unloads what all tenants share. Raises Forbidden."""
    if ADAPTERS not in request.state.scopes:
        raise Forbidden("This changes what all tenants share: it needs an API key of scope admin.")
