"""What is wanted later is asked of the store, of every KV group, and of nobody where there is no store with tiers."""

from __future__ import annotations

from tokenmill.core.block import full_groups, window_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import PinBlocks, PromoteBlocks, StoreOpened
from tokenmill.core.kv_events import KeepKV, PromoteKV
from tokenmill.core.moves import Prefetch, Prefetched
from tokenmill.core.tiers import HOST, TierFacts
from tokenmill.engine.core import EngineCore

CONFIG = EngineConfig(groups=(*full_groups(40), window_group(40, 16)), max_model_len=128)
KEYS = b"a" * 16 + b"b" * 16


def test_without_tiers_nothing_is_asked() -> None:
    core = EngineCore(CONFIG)
    assert core.handle(KeepKV(KEYS, 5.0), 0.0).jobs == ()
    assert core.handle(PromoteKV(KEYS), 0.0).jobs == ()
    assert core.handle(Prefetch(3, (b"a" * 16,)), 0.0).answers == (Prefetched(3, 0, "It has no store with tiers."),)


def test_with_tiers_the_store_is_asked() -> None:
    core = EngineCore(CONFIG)
    core.handle(StoreOpened(tiers=(TierFacts(HOST, 1 << 20),)), 0.0)
    wanted = ((0, b"a" * 16), (1, b"a" * 16), (0, b"b" * 16), (1, b"b" * 16))
    assert core.handle(KeepKV(KEYS, 5.0, "alice"), 0.0).jobs == (PinBlocks(wanted, 5.0, "alice"),)
    assert core.handle(PromoteKV(KEYS), 0.0).jobs == (PromoteBlocks(wanted),)
