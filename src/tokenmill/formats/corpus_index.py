"""The file of a corpus index: the tokens of texts, and where each of them is, in the order of what is before it.

    bytes 0 to 128    magic, version, number of tokens of the vocabulary, of tokens, places and texts; what the
                      tokenizer's ids stand for (a digest), SHA-256 of all this, without itself, and of what follows
    from byte 4096    tokens, int32: -1, then those of a text, and so on; -1 at the end
    behind them       places, int32: of the tokens that another of the same text follows, ordered by the contexts that
                      end in them (`ops/contexts.py`)

All numbers are little-endian. It is mapped read-only, so that processes share one copy of it in the page cache.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import ConfigError

END = -1
"""Before each text and behind the last one."""

DATA_OFFSET = 4096

_HEADER = struct.Struct("<8sIIqqq32s")
_MAGIC, _VERSION = b"tmcorpus", 1
_SUMMED_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Header:
    """tokenizer: `Tokenizer.digest` of the one that the tokens are of, in hex."""

    vocab_size: int
    num_tokens: int
    num_places: int
    num_texts: int
    tokenizer: str

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return DATA_OFFSET + 4 * (self.num_tokens + self.num_places)

    def pack(self, arrays: Iterable[np.ndarray]) -> bytes:
        """With the sum of itself and of what follows it."""
        numbers = (self.vocab_size, self.num_tokens, self.num_places, self.num_texts)
        packed = _HEADER.pack(_MAGIC, _VERSION, *numbers, bytes.fromhex(self.tokenizer))
        digest = hashlib.sha256(packed)
        for array in arrays:
            for start in range(0, len(array), _SUMMED_AT_ONCE):
                digest.update(array[start : start + _SUMMED_AT_ONCE].data)
        return packed + digest.digest()


@dataclass(frozen=True, slots=True)
class CorpusIndex:
    """tokens, places: int32, mapped from the file."""

    path: Path
    header: Header
    tokens: np.ndarray
    places: np.ndarray


def open_corpus(path: Path, tokenizer: str) -> CorpusIndex:
    """Map an index, whole and as it was written, for a model with this tokenizer. All of it is read once. Raises
    ConfigError."""
    try:
        with open(path, "rb") as file:
            head, num_bytes = file.read(_HEADER.size + 32), path.stat().st_size
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from None
    if not head.startswith(_MAGIC):
        raise _bad(path, "is no index that tokenmill draft index has written")
    if len(head) < _HEADER.size + 32:
        raise _bad(path, "is cut; build it again")
    _, version, vocab_size, num_tokens, num_places, num_texts, digest = _HEADER.unpack(head[: _HEADER.size])
    if version != _VERSION:
        raise _bad(path, f"is of version {version}, this program reads version {_VERSION}; build it again")
    header = Header(vocab_size, num_tokens, num_places, num_texts, digest.hex())
    if num_tokens < 3 or not 0 < num_places < num_tokens or header.num_bytes != num_bytes:
        raise _bad(path, f"is cut: it has {num_bytes} of {header.num_bytes} bytes; build it again")
    if header.tokenizer != tokenizer:
        raise _bad(path, "was built for another tokenizer; build it again with the model that is served")
    data = np.memmap(path, np.dtype("<i4"), "r", DATA_OFFSET)
    tokens, places = data[:num_tokens], data[num_tokens:]
    if header.pack((tokens, places)) != head:
        raise _bad(path, "is damaged: its checksum is another; build it again")
    bounds = (tokens.min() >= END, tokens.max() < vocab_size, places.min() > 0, places.max() < num_tokens - 1)
    if not all(bounds) or tokens[0] != END or tokens[-1] != END:
        raise _bad(path, "is damaged: it names what is not there; build it again")
    return CorpusIndex(path, header, tokens, places)


def _bad(path: Path, what: str) -> ConfigError:
    return ConfigError(f"The corpus {path} {what}.", param="speculative_config")
