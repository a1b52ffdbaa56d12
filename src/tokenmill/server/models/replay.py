"""A call whose body was read, to be read again."""

from __future__ import annotations

from starlette.types import Message, Receive, Scope


def unread(scope: Scope, body: bytes, receive: Receive) -> tuple[Scope, Receive]:
    """A scope and a receive by which a body that was read is read again, as it was decoded."""
    dropped = (b"content-encoding", b"content-length")
    headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
    headers.append((b"content-length", str(len(body)).encode()))
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return {**scope, "headers": headers}, again
