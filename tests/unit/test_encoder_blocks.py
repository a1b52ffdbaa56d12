"""Blocks of what an encoder made: one for each content, shared, cached, and kept back while a step may read them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenmill.core.block import cross_group, full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.embeds import Embeds
from tokenmill.core.errors import ContextTooLong
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import Sequence
from tokenmill.engine.journal import header_line, read_journal
from tokenmill.kv.blocks.encoder import EncoderLedger
from tokenmill.kv.blocks.manager import BlockManager
from tokenmill.sched.admission import refusal

CONFIG = EngineConfig(full_groups(64), 64, encoder=cross_group(2))


def sequence(*digests: bytes, salt: str = "") -> Sequence:
    embeds = tuple(Embeds(place, 1, digest) for place, digest in enumerate(digests))
    request = Request("r", (7,) * 8, SamplingParams(), 4, 0, embeds=embeds, cache_salt=salt)
    return Sequence(0, request, [7] * 8)


def test_equal_contents_share_a_block_once_it_is_to_be_filled() -> None:
    """One block for a content that comes twice; others share it from the first row on, and cached ones need no step."""
    pool = BlockManager(2, 1)
    ledger = EncoderLedger(CONFIG, pool)
    first, second, third = sequence(b"a", b"b", b"a"), sequence(b"b"), sequence(b"b", salt="other")
    ledger.take(first, ())
    assert first.encoded == first.unencoded == (0, 1) and ledger.blocks_of(first) == (0, 1, 0)
    assert not ledger.can_take(second, ()), "nothing has been planned that fills a block"
    published = ledger.begin(first)
    assert published == [(pool, 0), (pool, 1)]
    assert not ledger.can_take(second, [published]), "the step may fail"
    assert ledger.can_take(second, ()) and not ledger.can_take(third, ())
    ledger.take(second, ())
    assert second.encoded == (1,) and not second.unencoded and not ledger.begin(second)
    ledger.check((first, second))
    ledger.release(first)
    ledger.check((second,))
    assert ledger.can_take(sequence(b"c"), ()) and not ledger.can_take(sequence(b"c", b"d"), ())


def test_a_block_is_not_filled_again_while_a_step_may_read_it() -> None:
    """What a sequence had is handed out once its last step has ended."""
    pool = BlockManager(1, 1)
    ledger = EncoderLedger(CONFIG, pool)
    first, second = sequence(b"a"), sequence(b"b")
    ledger.take(first, ())
    first.last_step = 3
    ledger.release(first)
    assert not ledger.can_take(second, ())
    pool.end_step(3)
    ledger.take(second, ())
    assert second.unencoded == (0,)


def test_what_may_be_wrong_is_not_shared() -> None:
    """After a corrupted row its contents are encoded again for whoever comes."""
    ledger = EncoderLedger(CONFIG, BlockManager(2, 1))
    first, second = sequence(b"a"), sequence(b"a")
    ledger.take(first, ())
    ledger.begin(first)
    ledger.forget(first)
    ledger.take(second, ())
    assert second.unencoded == (1,)


def test_more_contents_than_blocks_are_refused() -> None:
    """Nothing that others do would make them fit."""
    refused = refusal(sequence(b"a", b"b", b"c").request, CONFIG, 0)
    assert isinstance(refused, ContextTooLong) and "3 different" in refused.message
    assert refusal(sequence(b"a", b"b", b"a").request, CONFIG, 0) is None


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, encoder=None)])
def test_a_journal_names_the_group_where_there_is_one(config: EngineConfig) -> None:
    """And is read with it; without one the header has no word of it."""
    line = header_line(config)
    assert ("encoder" in line) == (config.encoder is not None)
    assert read_journal([line + "\n"])[0] == config
