"""Builds the index of a corpus: the file of formats/corpus_index.py, from which a server drafts.

Tokens go to the file as they are made, so that texts are read in bounded memory. Ordering their places is not: it
takes about 50 bytes a token (`ops/contexts.py`), and the index 8 bytes on disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import numpy as np

from ..core.errors import ConfigError
from ..formats.corpus_index import DATA_OFFSET, END, Header
from ..ops.contexts import followed_places, sort_contexts
from ..text.tokenizer import Tokenizer
from .texts import Text

MOST_TOKENS = 2**31 - 2

Progress = Callable[[int, int], None]
"""Told the texts and tokens so far."""


def build_index(tokenizer: Tokenizer, texts: Iterable[Text], out: Path, progress: Progress | None = None) -> Header:
    """Write the index of `texts`; whoever reads `out` finds what was there before or all of it. Equal texts give equal
    bytes. Special tokens that a text spells out are text. Raises ConfigError."""
    try:
        handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=".new-")  # for its owner alone
    except OSError as error:
        raise _unwritable(out, error) from None
    try:
        with open(handle, "r+b") as file:
            file.seek(DATA_OFFSET)
            num_texts, num_tokens = 0, 0
            for text in texts:
                num_new = _write_text(file.write, tokenizer, text)
                num_texts, num_tokens = num_texts + (num_new > 0), num_tokens + num_new
                if num_tokens >= MOST_TOKENS:
                    raise ConfigError(f"An index has {MOST_TOKENS:,} tokens at most; build several.", param="files")
                if progress is not None:
                    progress(num_texts, num_tokens)
            file.write(np.array([END], "<i4").tobytes())
            file.flush()
            header = _order(file, num_tokens + 1, num_texts, tokenizer)
            os.fsync(file.fileno())
        os.replace(temporary, out)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise _unwritable(out, error) from None
        raise
    return header


def _write_text(write: Callable[[bytes], object], tokenizer: Tokenizer, text: Text) -> int:
    """How many tokens, with the one before it; 0: it has none."""
    num_tokens = 0
    for piece in text:
        tokens = tokenizer.encode(piece, add_special=False, parse_special=False, shared=False)
        if tokens and not num_tokens:
            tokens.insert(0, END)
        write(np.array(tokens, "<i4").tobytes())
        num_tokens += len(tokens)
    return num_tokens


def _order(file: IO[bytes], num_tokens: int, num_texts: int, tokenizer: Tokenizer) -> Header:
    """Write the places and the header."""
    tokens = np.memmap(file, np.dtype("<i4"), "r", DATA_OFFSET, (num_tokens,))
    places = followed_places(tokens)
    if not len(places):
        raise ConfigError("There is no text of two tokens in what is to be indexed.", param="files")
    header = Header(tokenizer.vocab_size, num_tokens, len(places), num_texts, tokenizer.digest())
    places = sort_contexts(tokens, places)
    file.seek(DATA_OFFSET + 4 * num_tokens)
    file.write(places.data)
    file.seek(0)
    file.write(header.pack((tokens, places)))
    file.flush()
    return header


def _unwritable(out: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out {out} cannot be written: {error.strerror or error}.", param="out")
