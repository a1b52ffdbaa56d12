"""Policies from files: found by their methods, checked before they are asked anything."""

from __future__ import annotations

import argparse
import copy
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from tokenmill.cli.options import add_options
from tokenmill.cli.serve_options import ServeOptions
from tokenmill.cluster.index import PrefixIndex
from tokenmill.cluster.router import make_routing
from tokenmill.core.config import OwnPolicy, check_name
from tokenmill.core.errors import ConfigError
from tokenmill.kv.blocks.eviction import pick as pick_eviction
from tokenmill.node.options import EngineOptions
from tokenmill.node.policy_file import own_policy, read_policy
from tokenmill.plan.policies import KINDS
from tokenmill.sched.policies import order_named

ORDER = """
from dataclasses import dataclass

@dataclass(frozen=True, slots=True)
class ShortAnswers:
    summary: str = "fewest tokens to draw"
    num_refreshed: int = 0
    patience: int = 0

    def due(self, waiting):
        return waiting.request.max_tokens
"""
EVICTION = """
class Oldest:
    summary = "published longest ago"

    def value(self, block, age, attention):
        return block.number
"""
ROUTING = """
class Last:
    uses_keys = False

    def __init__(self, index, most=3):
        self.index, self.most = index, most

    def choose(self, request, links, now):
        raise NotImplementedError

    def leave(self, link):
        pass

    def note_fetch(self, num_tokens, took_s):
        pass
"""
OTHERS = {
    "admission": "class P:\n def judge(self, newcomer, calls, now): ...",
    "disaggregation": "class P:\n def splits(self, request, at, now): ...",
    "migration": "class P:\n def propose(self, view): ...",
    "replication": "class P:\n is_wanted = True\n def note(self, keys, num_new, now): ...\n"
    " def propose(self, view, now): ...",
    "tier-admission": "class P:\n def admits(self, block, now): ...",
    "tiering": "class P:\n def __init__(self, num_bytes): ...\n"
    + "\n".join(
        f" def {each}: ..."
        for each in (
            "add(self, b, now)",
            "use(self, b, now)",
            "bare(self, b)",
            "remove(self, b)",
            "victim(self, may, now)",
        )
    ),
}


def write(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text, "utf8")
    return str(path)


def test_each_kind_is_known_by_its_methods(tmp_path: Path) -> None:
    found = {}
    for text in (ORDER, EVICTION, ROUTING, *OTHERS.values()):
        kind, policy = read_policy(write(tmp_path, text), KINDS, "policy")
        found[kind.name] = policy
    assert set(found) == {"scheduling", "eviction", "routing", *OTHERS}
    assert set(found) == {kind.name for kind in KINDS}
    assert found["tiering"].make(num_bytes=5) is not None
    assert found["routing"] == str(tmp_path / "mine.py") + ":Last"


def test_a_policy_is_chosen_by_its_name_wherever_ours_are(tmp_path: Path) -> None:
    """Engines, front ends and routers look it up as they do with a name."""
    path = write(tmp_path, ORDER + EVICTION + ROUTING)
    options = EngineOptions(scheduling_policy=f"{path}:ShortAnswers", eviction_policy=f"{path}:Oldest")
    assert order_named(options.scheduling_policy).summary == "fewest tokens to draw"
    assert pick_eviction(options.eviction_policy).summary == "published longest ago"
    index = PrefixIndex()
    routing = make_routing(ServeOptions(routing_policy=f"{path}:Last").routing_policy, index)
    other = make_routing(ServeOptions(routing_policy=f"{path}:Last").routing_policy, index)
    assert (routing.index, routing.most) == (index, 3) and routing is not other  # type: ignore[attr-defined]


def test_it_goes_to_other_processes_as_text_and_is_read_there(tmp_path: Path) -> None:
    options = EngineOptions(scheduling_policy=write(tmp_path, ORDER))
    again = EngineOptions(**json.loads(json.dumps(asdict(options))))
    assert isinstance(again.scheduling_policy, OwnPolicy) and again == options
    assert copy.deepcopy(options).scheduling_policy is options.scheduling_policy


def test_flags_take_names_and_files(tmp_path: Path) -> None:
    path = write(tmp_path, ORDER)
    parser = argparse.ArgumentParser()
    for kind in (EngineOptions, ServeOptions):
        add_options(parser, kind, ("scheduling_policy", "routing_policy"))
    args = parser.parse_args(["--scheduling-policy", path, "--routing-policy", "least_load"])
    assert (args.scheduling_policy, args.routing_policy) == (path, "least_load")
    with pytest.raises(
        ConfigError, match=r"--scheduling-policy must be one of .* Did you mean 'short-prompts-first'\?"
    ):
        EngineOptions(scheduling_policy="short-prompt-first")
    assert own_policy("lru", KINDS[0], "policy", ["lru"]) == "lru"
    with pytest.raises(ConfigError, match="must be one of"):
        check_name("mine.py", ["lru"], "policy")  # a mere text is none


BAD = {
    "several": (ORDER + EVICTION, "", "it has several policies, name one: mine.py:ShortAnswers, mine.py:Oldest"),
    "no such class": (ORDER, ":ShortAnswer", "the file has no class 'ShortAnswer'. Did you mean 'ShortAnswers'?"),
    "no policy": ("class A:\n pass", "", "no class in it has the methods of a policy"),
    "not Python": ("class A\n pass", "", "line 1 is no Python"),
    "fails": ("x = 1 / 0", "", "running it failed: ZeroDivisionError: division by zero"),
    "exits": ("raise SystemExit(3)", "", "running it failed: SystemExit: 3"),
    "a field missing": (EVICTION.replace("summary", "about"), "", "Oldest is no eviction policy: it has no summary"),
    "arguments": (EVICTION.replace("block, age, ", "block, "), "", "value must take (self, block, age, attention)"),
    "constructor": (
        EVICTION + "\n    def __init__(self, speed): ...", "",
        "Oldest() wants speed; it must be made without arguments",
    ),
    "a method missing": (ROUTING.replace("def leave", "def left"), "", "Last is no routing policy: it has no leave"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, what: str) -> None:
    text, name, message = BAD[what]
    with pytest.raises(ConfigError, match=re.escape(message)) as told:
        read_policy(write(tmp_path, text) + name, KINDS, "policy")
    assert told.value.param == "policy" and "\n" not in told.value.message
    assert told.value.message.startswith("--policy ")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        EngineOptions(eviction_policy=str(tmp_path / "none.py"))


def test_a_class_that_does_not_tell_what_it_takes_may_be_a_policy(tmp_path: Path) -> None:
    """Compiled ones do not, nor do those that are made as a dict is."""
    text = "class Oldest(dict):\n    summary = 'oldest'\n    value = dict.update\n"
    kind, policy = read_policy(write(tmp_path, text), KINDS, "policy")
    assert kind.name == "eviction" and policy.make().summary == "oldest"
