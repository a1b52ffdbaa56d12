"""GET /v1/requests/ID/stream: the rest of a stream, for a client that has lost its connection or its server."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import InvalidRequest, NotFound
from .book import Book
from .layer import follow
from .line import Line
from .record import KeptAnswer

_LAST = "last-event-id"


def routes(book: Book | None) -> list[Route]:
    """`book`: None: nothing is kept."""

    async def stream(request: HttpRequest) -> ASGIApp:
        if book is None:
            raise NotFound("Streams are not kept here; start the server with --resume-file FILE.")
        name = request.path_params["id"]
        after = _after(request)
        found = await book.find(request.state.owner, name)
        if found is None:
            raise NotFound(f"No stream {name[:100]!r} of this key is under way or kept.", param="id")
        book.num_reconnects += 1
        return _Rest(book, found, after)

    return [Route("/v1/requests/{id}/stream", stream)]


class _Rest:
    def __init__(self, book: Book, found: Line | KeptAnswer, after: int) -> None:
        self._book = book
        self._found = found
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._found
        direct = scope["state"].get("send", send)
        if isinstance(found, Line):
            await follow(self._book, found, self._after, receive, send, direct)
            return
        await send({"type": "http.response.start", "status": found.status, "headers": list(found.headers)})
        body = rest_of(found, self._after)
        await direct({"type": "http.response.body", "body": body, "more_body": False})


def rest_of(answer: KeptAnswer, after: int) -> bytes:
    """The events of a kept answer behind number `after`; an answer that is no stream whole."""
    if answer.status != 200 or after == 0:
        return answer.body
    return b"".join(part + b"\n\n" for part in answer.body.split(b"\n\n")[after:-1])


def _after(request: HttpRequest) -> int:
    text = request.query_params.get("after", request.headers.get(_LAST, "0"))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest(f"after must be the id of an event of the stream, got {text[:100]!r}.", param="after")
    return int(text)
