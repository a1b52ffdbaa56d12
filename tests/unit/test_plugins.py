"""Plug-ins: found by name without being imported, checked before they are used, and never in place of what is ours. The
example packages of docs/develop/plugins are installed by pip."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plugin_packages import forget, install_examples, make_package
from scripted import make_text_model
from tiny import logits_of, tensor, tiny_checkpoint
from tokenmill.cli.main import main
from tokenmill.cli.serve_options import ServeOptions
from tokenmill.cluster.index import PrefixIndex
from tokenmill.cluster.router import make_routing
from tokenmill.core.errors import BadCheckpoint, ConfigError
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.formats.config_keys import value_of
from tokenmill.kv.transfer.remote.tier import open_backend
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.families import declared_elsewhere
from tokenmill.models.unsupported_keys import unread_keys
from tokenmill.node.options import EngineOptions
from tokenmill.plan.policies import read_policies
from tokenmill.plugins import load
from tokenmill.plugins.groups import GROUPS, ROUTING_POLICIES
from tokenmill.sched.policies import order_named
from tokenmill.text.chat_format import find_chat_format
from tokenmill.text.grammar.build import to_grammar
from tokenmill.text.grammar.constraint import Constraint
from tokenmill.text.tools.call_grammar import ToolConstraint
from tokenmill.text.tools.tool_choice import Tool, ToolUse
from tool_answers import Said, read

EXAMPLES = {
    "tokenmill.routing_policies": "fewest_prompt_tokens",
    "tokenmill.scheduling_policies": "short-answers-first",
    "tokenmill.tool_parsers": "internlm",
    "tokenmill.reasoning_parsers": "command_a",
    "tokenmill.families": "OrionForCausalLM",
    "tokenmill.kv_backends": "sqlite",
    "tokenmill.observers": "statsd",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_examples(tmp_path_factory.mktemp("plugins"))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was found before is forgotten, as in a new process."""
    monkeypatch.delenv(load.VARIABLE, raising=False)
    forget()
    yield
    forget()


@pytest.fixture
def examples(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(site)
    return site


def test_there_is_an_example_of_every_group(examples: Path) -> None:
    found = {each.group.name: each.name for each in load.installed() if each.package.startswith("tokenmill-")}
    assert found == EXAMPLES
    assert [group.name for group in GROUPS] == list(found)


def test_policies_of_plugins_are_chosen_by_name(examples: Path) -> None:
    """Wherever ours are: by flags of a server and its engines, and in simulations."""
    engine = EngineOptions(scheduling_policy="short-answers-first")
    assert order_named(engine.scheduling_policy).summary == "fewest tokens to draw, with aging"
    routing = ServeOptions(routing_policy="fewest_prompt_tokens").routing_policy
    assert type(make_routing(routing, PrefixIndex())).__name__ == "FewestPromptTokens"
    chosen = read_policies(["fewest_prompt_tokens", "scheduling=short-answers-first"]).named
    assert chosen == {"routing": "fewest_prompt_tokens", "scheduling": "short-answers-first"}
    assert type(make_routing(chosen["routing"], PrefixIndex())).__name__ == "FewestPromptTokens"


MARKS = ["<|action_start|>", "<|plugin|>", "<|action_end|>"]
ANSWER = (
    "<|START_THINKING|>Rain?<|END_THINKING|>Let me look. "
    '<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>'
)


def test_an_answer_is_read_by_parsers_of_plugins(examples: Path) -> None:
    """Alike however it is cut; and the grammar that demands calls has the form that the parser reads."""
    tokenizer = make_text_model(specials=MARKS).tokenizer
    chat_format = find_chat_format(None, tokenizer, tool_parser="internlm", reasoning_parser="command_a")
    use = ToolUse((Tool("f"),))
    for cut in range(len(ANSWER)):
        parser = chat_format.parser(use, "r")
        assert parser is not None
        said = read(parser, ANSWER[:cut], ANSWER[cut:])
        assert said == Said("Let me look.", "Rain?", (("f", '{"a": 1}'),))
    assert chat_format.specials.keys() == set(MARKS)
    demanded = ToolConstraint("internlm", ToolUse(use.tools, "required"), "tools[{}]").as_json()
    grammar = to_grammar(Constraint("tools", demanded, "tools"), tokenizer)
    assert all(f"<[{tokenizer.token_id(mark)}]>" in grammar for mark in MARKS)


def test_parsers_that_are_not_there_are_told_of(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_text_model().tokenizer
    with pytest.raises(ConfigError, match=r"--tool-call-parser is 'intern'; known are auto, .*json, internlm\."):
        find_chat_format(None, tokenizer, tool_parser="intern")
    with pytest.raises(ConfigError, match=r"--reasoning-parser is 'command'; known are auto, none, .*, command_a\."):
        find_chat_format(None, tokenizer, reasoning_parser="command")
    monkeypatch.setenv(load.VARIABLE, "off")
    with pytest.raises(ConfigError, match=r"'internlm'; known are auto, .*json; plug-ins are off\."):
        find_chat_format(None, tokenizer, tool_parser="internlm")


def test_a_parser_has_the_name_of_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes tell each other of a parser by its name."""
    family = "from tokenmill.text.reasoning import ReasoningFamily\nplugin = Plugin(1, ReasoningFamily('a', '<', '>'))"
    make_package(tmp_path, "tokenmill.reasoning_parsers", "b", f"{STATES}{family}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "made_up", raising=False)
    with pytest.raises(ConfigError, match="cannot be used: what it provides is called 'a'; the names must be equal"):
        find_chat_format(None, make_text_model().tokenizer, reasoning_parser="b")


def orion() -> Checkpoint:
    """Random weights. Llama's tensors, with biases of its norms."""
    llama = tiny_checkpoint()
    biases = [name.replace(".weight", ".bias") for name in llama.tensors if "norm" in name]
    rng = np.random.default_rng(1)
    tensors = {**llama.tensors, **{name: tensor(name, rng.normal(size=64)) for name in biases}}
    said = {**llama.metadata, "architectures": ["OrionForCausalLM"], "model_type": "orion", "wings": 2}
    return replace(llama, metadata=said, tensors=tensors)


def test_a_family_of_a_plugin_is_read(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orion's decoder is that of StableLM without biases and with whole heads turned: the same weights give the same
    logits. What the plug-in declares is part of what is computed; of our families nothing is."""
    checkpoint = orion()
    names = {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "layer_norm_eps": 1e-5}
    stablelm = replace(checkpoint, metadata={**checkpoint.metadata, **names, "partial_rotary_factor": 1.0})
    np.testing.assert_array_equal(logits_of(checkpoint), logits_of(stablelm))
    assert unread_keys(checkpoint) == ("wings",) and value_of(checkpoint.metadata, "bos_token_id") == 1
    ours, theirs = (config_from_checkpoint(each) for each in (stablelm, checkpoint))
    assert declared_elsewhere(ours.architecture, ours.family) == ()
    assert declared_elsewhere(theirs.architecture, theirs.family) == (repr(theirs.family),)
    monkeypatch.setenv(load.VARIABLE, "off")
    with pytest.raises(BadCheckpoint, match="architecture 'OrionForCausalLM' is not supported"):
        config_from_checkpoint(checkpoint)


def test_a_family_must_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, "tokenmill.families", "OrionForCausalLM", f"{STATES}plugin = Plugin(1, 'Orion')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "made_up", raising=False)
    with pytest.raises(ConfigError, match=r"it provides a str; it must be a tokenmill\.models\.family\.Family\."):
        config_from_checkpoint(orion())


BACKEND = """
class Store:
    name, num_threads, batch_bytes, look_names, look_s = "mine", 1, 1, 1, 1.0
    OPTIONS = ("room",)
    def __init__(self, address): self.room = address.number("room", 1)
    def check(self, limit_s): raise ValueError("no room")
    def has(self, names, limit_s): ...
    def get(self, names, most_bytes, take, limit_s): ...
    def put(self, values, limit_s): ...
    def delete(self, names, limit_s): ...
    def close(self): ...
plugin = Plugin(1, Store)
"""
BACKENDS = {
    "": "",
    "def put": "Store is no KV backend: it has no put.",
    "values, limit_s": "Store is no KV backend: put must take (self, values, limit_s).",
    "num_threads": "Store is no KV backend: it has no num_threads.",
    "address.": "Store failed: NameError: name 'number' is not defined",
}


@pytest.mark.parametrize("missing", BACKENDS)
def test_a_kv_backend_is_checked_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """And what it raises later is a failure of its store, which costs a miss and not the server."""
    code = BACKEND.replace(missing, "def push" if missing == "def put" else "other" if missing == "num_threads" else "")
    make_package(tmp_path, "tokenmill.kv_backends", "mine", STATES + (code if missing else BACKEND))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "made_up", raising=False)
    if missing:
        with pytest.raises(ConfigError, match=re.escape(BACKENDS[missing])) as told:
            open_backend("mine://x")
        assert told.value.param == "kv_remote"
        return
    with pytest.raises(ConfigError, match="unknown option rooms; there are: epoch, room"):
        open_backend("mine://x?rooms=2")
    with pytest.raises(ConfigError, match=r"begins with one of: redis://, .*mooncake://, mine://"):
        open_backend("theirs://x")
    with pytest.raises(OSError, match="ValueError: no room"):
        open_backend("mine://x?room=2")[0].check(1.0)


WAITING = """
from threading import Event
entered, leave = Event(), Event()
done = []
def check(self, limit_s):
    entered.set()
    assert leave.wait(60)
    done.append("check")
Store.check = check
Store.close = lambda self: done.append("close")
"""


def test_a_kv_backend_is_closed_after_its_last_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plug-in holds may not bear being closed while another thread uses it: SQLite's connections do not."""
    make_package(tmp_path, "tokenmill.kv_backends", "mine", STATES + BACKEND + WAITING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "made_up", raising=False)
    backend, _ = open_backend("mine://x")
    module = sys.modules["made_up"]
    call = threading.Thread(target=backend.check, args=(1.0,))
    call.start()
    assert module.entered.wait(60)
    backend.close()
    with pytest.raises(OSError, match="the store is closed"):
        backend.has(["name"], 1.0)
    assert module.done == []
    module.leave.set()
    call.join(60)
    backend.close()
    assert module.done == ["check", "close"]


def test_doctor_lists_them_and_imports_none(site: Path) -> None:
    code = "from tokenmill.cli.main import main; import sys; main(['doctor']); print(sorted(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(site)}
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    for group, name in EXAMPLES.items():
        assert re.search(rf"plug-in +{group} {name}, of tokenmill-[a-z-]+ 0\.1\.0\n", told), told
    assert "tokenmill_" not in told.splitlines()[-1]
    env[load.VARIABLE] = "off"
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert "none is looked at (TOKENMILL_PLUGINS=off)" in told and "fewest" not in told


def test_none_is_looked_at_when_they_are_off(
    examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--plugins off` holds for processes that are started too, since it is put in the environment."""
    monkeypatch.setenv(load.VARIABLE, "on")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: pytest.fail("looked"))
    assert main(["serve", "nothing", "--routing-policy", "fewest_prompt_tokens", "--plugins", "off"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tokenmill: --routing-policy (plug-ins are off) must be one of kv_aware")
    assert told.count("\n") == 1 and os.environ[load.VARIABLE] == "off"


def test_the_nearest_name_may_be_a_plugins(examples: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fewest_prompt_tokens'"):
        ServeOptions(routing_policy="fewest_prompt_token")
    with pytest.raises(ConfigError, match="Did you mean 'short-answers-first'"):
        read_policies(["short-answer-first"])


def test_what_is_built_in_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in that has the name of ours is not even imported."""
    make_package(tmp_path, ROUTING_POLICIES.name, "least_load", "raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert type(make_routing(ServeOptions(routing_policy="least_load").routing_policy, PrefixIndex())).__name__ == (
        "LeastLoad"
    )


STATES = "from tokenmill.plugins.groups import Plugin\n"
BAD = {
    "another version": (
        f"{STATES}plugin = Plugin(7, object)",
        "made-up 1.5 was written for version 7 of the interface, this tokenmill has version 1; install a release of"
        " made-up for it.",
    ),
    "fails": ("x = 1 / 0", "loading made_up:plugin of made-up 1.5 failed: ZeroDivisionError: division by zero"),
    "exits": ("raise SystemExit(3)", "loading made_up:plugin of made-up 1.5 failed: SystemExit: 3"),
    "nothing there": ("", "loading made_up:plugin of made-up 1.5 failed: AttributeError: module 'made_up' has no"),
    "no version": ("plugin = object", "made_up:plugin is of type type; it must be a tokenmill.plugins.groups.Plugin."),
    "no class": (f"{STATES}plugin = Plugin(1, 5)", "it provides a int; it must be a class."),
    "no policy": (f"{STATES}class A:\n uses_keys = False\nplugin = Plugin(1, A)", "A is no routing policy: it has no"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    code, why = BAD[what]
    make_package(tmp_path, ROUTING_POLICIES.name, "mine", code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "made_up", raising=False)
    with pytest.raises(ConfigError) as told:
        ServeOptions(routing_policy="mine")
    message = told.value.message
    assert message.startswith(f"The plug-in 'mine' of tokenmill.routing_policies cannot be used: {why}"), message
    assert "\n" not in message and told.value.param == "routing_policy"


def test_a_name_that_two_packages_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("one-of-two", "two-of-two"):
        make_package(tmp_path, ROUTING_POLICIES.name, "mine", f"{STATES}plugin = Plugin(1, object)", package)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"several packages have one of this name \(one-of-two, two-of-two\)"):
        ServeOptions(routing_policy="mine")


def test_the_switch_says_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(load.VARIABLE, "no")
    with pytest.raises(ConfigError, match="TOKENMILL_PLUGINS must be on or off, got 'no'"):
        ServeOptions(routing_policy="mine")
