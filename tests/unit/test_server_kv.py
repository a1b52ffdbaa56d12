"""/admin/kv/...: what operators ask of a KV store reaches it in its words, for the KV that requests would use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from scripted import Served
from tokenmill.control.kv_store import stored_prefix
from tokenmill.core.errors import Unavailable
from tokenmill.kv.blocks.hashing import prompt_keys

SYSTEM = {"messages": [{"role": "system", "content": "You are a parrot, and repeat what is said to you."}]}


class Store:
    """Notes what it is asked; has the first `num_stored` blocks of whatever is looked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.num_stored = 0
        self.is_there = True

    async def ask(self, what: str, argument: Mapping[str, Any]) -> Any:
        if not self.is_there:
            raise Unavailable("The KV store does not answer.")
        self.asked.append((what, argument))
        num_keys = len(argument.get("keys", ()))
        return {
            "stat": {"tiers": {"host": {"bytes": 5, "hits": 3}}, "socket": "s"},
            "list": {"blocks": [], "more": False},
            "find": {"digits": [("12" * num_keys)[: self.num_stored].ljust(num_keys, "0")]},
            "clear": {"blocks": 7},
        }.get(what, {})

    def last(self, what: str) -> Mapping[str, Any]:
        return next(argument for name, argument in reversed(self.asked) if name == what)


@pytest.fixture(scope="module")
def store() -> Store:
    return Store()


@pytest.fixture(scope="module")
def served(store: Store) -> Iterator[Served]:
    with Served(lambda prompt: "Hi", ask_kv=store.ask) as served:
        yield served


def post(served: Served, name: str, body: Any) -> tuple[int, dict[str, Any]]:
    status, text, _ = served.ask(f"/admin/kv/{name}", body)
    return status, json.loads(text)


def test_a_prompt_is_found_by_the_keys_that_requests_have(served: Served, store: Store) -> None:
    store.num_stored = 3
    text = "A text of some length, of which a part is stored. " * 3
    status, found = post(served, "find", {"prompt": text, "cache_salt": "me"})
    tokens = served.text.tokenizer.encode(text)
    keys = prompt_keys("toy-numerics", "", "me", tokens, served.engine.block_size)
    assert status == 200 and found["keys"] == [keys[at : at + 16].hex() for at in range(0, len(keys), 16)]
    assert found["num_tokens"] == len(tokens) and found["num_blocks"] == len(keys) // 16 > 3
    assert found["num_stored"] == 3 and found["tiers"] == {"host": 2, "disk": 1}
    assert post(served, "find", {"prompt": list(tokens), "cache_salt": "me"})[1] == found


def test_a_system_message_is_pinned_as_far_as_all_begin_with_it(served: Served, store: Store) -> None:
    """The keys are those of a conversation that goes on after it, and not of an answer to it."""
    assert post(served, "pin", SYSTEM | {"seconds": 60})[1]["pinned_s"] == 60
    pinned = store.last("pin")
    talk = {"messages": [*SYSTEM["messages"], {"role": "user", "content": "Good morning, how are you today?" * 3}]}
    keys = post(served, "find", talk)[1]["keys"]
    assert pinned["keys"] and keys[: len(pinned["keys"])] == pinned["keys"]
    assert pinned["seconds"] == 60 and pinned["owner"] == ""
    assert post(served, "pin", SYSTEM)[1]["pinned_s"] is None and store.last("pin")["seconds"] == -1
    assert post(served, "unpin", SYSTEM)[0] == 200 and store.last("pin")["seconds"] == 0
    assert post(served, "drop", SYSTEM)[0] == 200 and store.last("drop")["keys"] == pinned["keys"]


def test_bounds_and_clearing_are_told_in_the_words_of_the_store(served: Served, store: Store) -> None:
    assert post(served, "quota", {"owner": "me", "bytes": 1000})[0] == 200
    assert store.last("quota") == {"owner": "me", "bytes": 1000}
    assert post(served, "clear", {"tier": "disk"})[1]["blocks"] == 7 and store.last("clear") == {"tier": "disk"}
    assert served.ask("/admin/kv/blocks?limit=5&tier=host")[0] == 200
    assert store.last("list") == {"limit": 5, "tier": "host"}


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("pin", {"prompt": "a", "messages": []}, "prompt"),
        ("pin", {}, "prompt"),
        ("pin", SYSTEM | {"seconds": -1}, "seconds"),
        ("pin", {"prompt": ["a", "b"]}, "prompt"),
        ("pin", SYSTEM | {"tenant": "nobody"}, "tenant"),
        ("clear", {"tier": "moon"}, "tier"),
        ("clear", {"tyre": "disk"}, "tyre"),
        ("quota", {"owner": "a", "tenant": "b"}, "owner"),
    ],
)
def test_what_is_wrong_is_named(served: Served, store: Store, name: str, body: Any, param: str) -> None:
    num_asked = len(store.asked)
    status, answer = post(served, name, body)
    assert status in (400, 404) and answer["error"]["param"] == param
    assert len(store.asked) == num_asked


def test_metrics_tell_of_the_store_and_of_its_absence(served: Served, store: Store) -> None:
    def series() -> dict[str, float]:
        lines = served.ask("/metrics")[1].splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}

    there = series()
    assert there['tokenmill:kv_store_up{model_name="toy"}'] == 1
    assert there['tokenmill:kv_tier_hits_total{model_name="toy",tier="host"}'] == 3
    store.is_there = False
    try:
        assert series()['tokenmill:kv_store_up{model_name="toy"}'] == 0
        assert served.ask("/admin/kv/tiers")[0] == 503
    finally:
        store.is_there = True
    assert json.loads(served.ask("/admin/kv/tiers")[1])["tiers"]["host"]["bytes"] == 5


def test_the_view_of_pools_has_the_tiers_below_them(served: Served, store: Store) -> None:
    assert json.loads(served.ask("/admin/kv")[1])["tiers"] == {"host": {"bytes": 5, "hits": 3}}
    store.is_there = False
    try:
        assert json.loads(served.ask("/admin/kv")[1])["tiers"] is None
    finally:
        store.is_there = True


def test_a_block_counts_where_all_its_groups_have_it() -> None:
    tiers = ("host", "disk", "remote", "peer")
    assert stored_prefix(["1122", "1210"], tiers, 4) == (4, 3, {"host": 1, "disk": 2})
    assert stored_prefix(["", ""], tiers, 0) == (0, 0, {})
