"""What a child process writes into a pipe until it ends."""

from __future__ import annotations

import asyncio
import os


async def read_to_end(fd: int) -> bytes:
    """All that comes, until nobody has the other end any more; `fd` stays open."""
    loop = asyncio.get_running_loop()
    data, closed = bytearray(), loop.create_future()

    def read() -> None:
        part = os.read(fd, 65536)
        data.extend(part)
        if not part and not closed.done():
            closed.set_result(None)

    loop.add_reader(fd, read)
    try:
        await closed
    finally:
        loop.remove_reader(fd)
    return bytes(data)
