"""A server that publishes what it caches: readers know its prefix trees, token by token, but for what has a salt."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import kill
import pytest
from serving import Server, wait_until

from kv_tree import Tree
from tokenmill.net.kv_events import END_SEQ, decode_batch, replayed

zmq = pytest.importorskip("zmq")
BLOCK = 16


def tree_of(address: str) -> Tree:
    """From all that is kept."""
    tree = Tree()
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.linger, asker.rcvtimeo = 0, 10_000
        asker.connect(address)
        asker.send_multipart((b"", bytes(8)))
        expected = 0
        while (reply := replayed(asker.recv_multipart()))[0] != int.from_bytes(END_SEQ, "big", signed=True):
            assert reply[0] == expected
            expected += 1
            tree.hear(decode_batch(reply[1])[1])
    return tree


def test_two_engines_publish_what_they_cache(tmp_path: Path) -> None:
    config = {
        "enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/again",
    }  # fmt: skip
    model = str(kill.write_model(tmp_path))
    flags = (*kill.ARGS, "--threads", "1", "--workers", "2", "--kv-events-config", json.dumps(config))
    rng = random.Random(3)
    shared = [rng.randrange(3, 250) for _ in range(70)]
    cached: set[tuple[int, ...]] = set()
    with Server(*flags, model=model) as server:
        assert f"ipc://{tmp_path}/events" in server.output
        for number in range(12):
            prompt = shared[: rng.randrange(70)] + [rng.randrange(3, 250) for _ in range(rng.randrange(1, 50))]
            salt = {"cache_salt": "mine"} if number % 3 == 2 else {}
            body = {"model": "tiny", "prompt": prompt, "max_tokens": rng.randrange(1, 60), "seed": number}
            body |= {"ignore_eos": True, "return_token_ids": True, **salt}
            status, said = server.request("POST", "/v1/completions", body)
            assert status == 200, said
            tokens = (*prompt, *json.loads(said)["choices"][0]["token_ids"])
            if not salt:
                # The last token was drawn, and nothing was computed of it.
                cached |= {tokens[:end] for end in range(BLOCK, len(tokens), BLOCK)}
        trees = [tree_of(config["replay_endpoint"] + end) for end in ("", "_dp1")]
    assert {prefix for tree in trees for prefix in tree.prefixes.values()} == cached
    assert all(len(set(tree.prefixes.values())) == len(tree.prefixes) for tree in trees)


@pytest.mark.sampled(1 / 3)
def test_calls_go_to_the_upstream_that_has_their_prompt(tmp_path: Path) -> None:
    """Two servers of one name tell of their caches; conversations return to where they were."""
    model = str(kill.write_model(tmp_path))
    far = []
    with contextlib.ExitStack() as held:
        for name in "ab":
            config = {"enable_kv_cache_events": True} | {
                field: f"ipc://{tmp_path}/{field}-{name}" for field in ("endpoint", "replay_endpoint")
            }
            flags = ("--threads", "1", "--kv-events-config", json.dumps(config))
            far.append(held.enter_context(Server(*kill.ARGS, *flags, model=model)))
        flags = ("--threads", "1", "--upstream-tokenizer", f"tiny={model}", "--served-model-name", "own")
        for name, server in zip("ab", far, strict=True):
            feed = f"tiny=ipc://{tmp_path}/endpoint-{name},replay=ipc://{tmp_path}/replay_endpoint-{name}"
            flags += ("--upstream", f"tiny={server.url}", "--upstream-kv-events", feed)
        front = held.enter_context(Server(*kill.ARGS[:4], *flags, model=model))
        rng = random.Random(4)
        talks = [[first, *(rng.randrange(3, 250) for _ in range(99))] for first in range(4)]

        said_blocks: dict[int, int] = {}

        def known() -> list[int]:
            (shown,) = json.loads(front.request("GET", "/admin/models")[1])["data"]
            return [each["num_cached_blocks"] for each in shown["upstreams"]]

        def served() -> list[float]:
            return [
                sum(v for k, v in each.metrics().items() if k.startswith("vllm:prompt_tokens_total")) for each in far
            ]

        def say(talk: list[int]) -> int:
            """Which of the two computed it."""
            before = served()
            said_blocks[talk[0]] = len(talk) // BLOCK
            body = {"model": "tiny", "prompt": talk, "max_tokens": 3, "ignore_eos": True}
            status, said = front.request("POST", "/v1/completions", body)
            assert status == 200, said
            (place,) = [at for at, (a, b) in enumerate(zip(before, served(), strict=True)) if a != b]
            wait_until(lambda: sum(known()) >= sum(said_blocks.values()), "events")
            talk += [rng.randrange(3, 250) for _ in range(20)]
            return place

        places = {}
        for number, talk in enumerate(talks):
            places[number] = say(talk)
        assert len(set(places.values())) == 2, "nothing is known of them, so they are shared"
        for number in rng.choices(range(4), k=8):
            assert say(talks[number]) == places[number]
        far[0].__exit__()
        wait_until(lambda: known()[0] == 0, "a server that has gone has nothing")
        assert known()[1] > 0
