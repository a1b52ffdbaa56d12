"""Bodies that come compressed: gzip and deflate are read, within the same bounds as plain ones; others are 415.

A few bytes can unfold to gigabytes, so no more is ever unfolded than a body may have, in pieces between which the event
loop does other work.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

from ..core.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding

READ = ("gzip", "x-gzip", "deflate")
_PIECE_BYTES = 1 << 18


async def decode_body(encoding: str, data: bytes, limit: int, hold: Callable[[int], None]) -> bytes:
    """`data` as it was before `encoding`, a Content-Encoding header. hold: called with the size of each piece that is
    unfolded. Raises UnsupportedEncoding, BodyTooLarge beyond `limit` bytes, InvalidRequest, and what `hold` raises."""
    codings = [coding.strip().lower() for coding in encoding.split(",")]
    codings = [coding for coding in codings if coding not in ("", "identity")]
    if len(codings) > 1 or any(coding not in READ for coding in codings):
        raise UnsupportedEncoding(
            f"A body with Content-Encoding {encoding[:100]!r} is not read here; send it plain, or by gzip or deflate."
        )
    return await _unfold(codings[0], data, limit, hold) if codings else data


async def _unfold(coding: str, data: bytes, limit: int, hold: Callable[[int], None]) -> bytes:
    parts: list[bytes] = []
    size, place, pending = 0, 0, b""
    unfolding = _start(coding, data)
    try:
        while not unfolding.eof:
            if not pending:
                pending = data[place : place + _PIECE_BYTES]
                place += len(pending)
            is_over = not pending
            part = unfolding.decompress(pending, _PIECE_BYTES)
            pending = unfolding.unconsumed_tail
            size += len(part)
            if size > limit:
                raise BodyTooLarge(f"The body is larger than {limit} bytes when it is decompressed.")
            hold(len(part))
            parts.append(part)
            if is_over and not part:
                raise InvalidRequest(f"The body is not valid {coding}: it ends too early.")
            await asyncio.sleep(0)
    except zlib.error:
        raise InvalidRequest(f"The body is not valid {coding}.") from None
    if unfolding.unused_data or place < len(data):
        raise InvalidRequest(f"The body is not valid {coding}: more follows its end.")
    return b"".join(parts)


def _start(coding: str, data: bytes) -> zlib._Decompress:
    """Deflate is sent with zlib's header, as it should be, and without."""
    if coding != "deflate":
        return zlib.decompressobj(16 + zlib.MAX_WBITS)
    has_header = len(data) > 1 and data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
