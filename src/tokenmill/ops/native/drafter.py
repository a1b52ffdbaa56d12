"""The native drafter without a model (native/src/drafter.cpp): one call for all rows of a step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64
from typing import Any

from ...core.speculation import CORPUS, NGRAM, SUFFIX, SpeculationConfig
from ...core.step import Drafts
from ..drafts import OUTPUT_BYTES, Corpus, Wanted
from .library import check, keeping_interpreter, load_library

_SOURCES = (NGRAM, SUFFIX, CORPUS)
"""tm_draft_source."""


class SettingsStruct(ctypes.Structure):
    _fields_ = (
        ("vocab_size", c_int32),
        ("ngram_min", c_int32),
        ("ngram_max", c_int32),
        ("suffix_depth", c_int32),
        ("suffix_first", c_int32),
        ("suffix_texts", c_int32),
        ("suffix_factor", c_float),
        ("suffix_chance", c_float),
        ("output_bytes", c_int64),
    )


class NativeDrafter:
    """ops.drafts.Drafter. output_bytes: for the outputs of ended sequences and their index."""

    def __init__(
        self,
        config: SpeculationConfig,
        vocab_size: int,
        corpora: Sequence[Corpus] = (),
        output_bytes: int = OUTPUT_BYTES,
    ) -> None:
        has_ngram, has_suffix = NGRAM in config.methods, SUFFIX in config.methods
        settings = SettingsStruct(
            vocab_size=vocab_size,
            ngram_min=config.prompt_lookup_min if has_ngram else 0,
            ngram_max=config.prompt_lookup_max if has_ngram else 0,
            suffix_depth=config.suffix_decoding_max_tree_depth if has_suffix else 0,
            suffix_first=config.methods[0] == SUFFIX,
            suffix_texts=config.suffix_decoding_max_cached_requests,
            suffix_factor=config.suffix_decoding_max_spec_factor,
            suffix_chance=config.suffix_decoding_min_token_prob,
            output_bytes=output_bytes if has_suffix else 0,
        )
        self._library = load_library()
        self._handle: Any = self._library.tm_drafter_new(ctypes.byref(settings))
        check(self._library, self._handle)
        self._corpora = tuple(corpora)  # whose memory the native one looks into
        for tokens, places in self._corpora:
            added = self._library.tm_drafter_add_corpus(
                self._handle, tokens.ctypes.data, places.ctypes.data, len(places)
            )
            check(self._library, added == 0)
        self._begin = keeping_interpreter("tm_drafter_begin")
        self._end = keeping_interpreter("tm_drafter_end")
        self._propose = keeping_interpreter("tm_drafter_propose")
        self._make_room(64)

    def begin(self, seq: int, scope: str, expected: int, num_before: int, corpora: Sequence[int] = ()) -> None:
        name = scope.encode("utf8", "surrogatepass").replace(b"\0", b"\xff")
        check(self._library, self._begin(self._handle, seq, name, expected, num_before) == 0)
        if corpora:
            numbers = array("i", corpora)
            used = self._library.tm_drafter_use_corpora(self._handle, seq, numbers.buffer_info()[0], len(numbers))
            check(self._library, used == 0)

    def end(self, seq: int) -> None:
        check(self._library, self._end(self._handle, seq) == 0)

    def propose(self, rows: Sequence[Wanted]) -> list[Drafts | None]:
        """Nothing, once it is closed: a step may be told of after its worker."""
        if self._handle is None:
            return [None] * len(rows)
        seqs, starts, tokens, most = array("q"), array("i", (0,)), array("i"), array("i")
        for seq, more, num_wanted in rows:
            seqs.append(seq)
            tokens.extend(more)
            starts.append(len(tokens))
            most.append(num_wanted)
        width = max(most, default=0)
        if len(rows) * max(1, width) > self._room:
            self._make_room(2 * len(rows) * max(1, width))
        asked = (seqs.buffer_info()[0], starts.buffer_info()[0], tokens.buffer_info()[0], most.buffer_info()[0])
        done = self._propose(self._handle, len(rows), *asked, width, *self._out_at)
        check(self._library, done == 0)
        counts, sources, drafts, chances = self._out
        proposed: list[Drafts | None] = [None] * len(rows)
        for row in range(len(rows)):
            if count := counts[row]:
                first = row * width
                last = first + count
                proposed[row] = Drafts(tuple(drafts[first:last]), _SOURCES[sources[row]], tuple(chances[first:last]))
        return proposed

    def _make_room(self, room: int) -> None:
        """For so many tokens of what is proposed: counts, sources, tokens, chances."""
        self._room = room
        self._out = (
            array("i", bytes(4 * room)),
            array("i", bytes(4 * room)),
            array("i", bytes(4 * room)),
            array("f", bytes(4 * room)),
        )
        self._out_at = [out.buffer_info()[0] for out in self._out]

    def close(self) -> None:
        """Forget everything, for good."""
        self._library.tm_drafter_free(self._handle)
        self._handle = None
        self._corpora = ()
