"""Plug-ins: found by name without being imported, checked before they are used, and never in place of what is ours. The
example packages of docs/develop/plugins are installed by pip."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugin_packages import install_examples, make_package
from tokenmill.cli.main import main
from tokenmill.cli.serve_options import ServeOptions
from tokenmill.cluster.index import PrefixIndex
from tokenmill.cluster.router import make_routing
from tokenmill.core.errors import ConfigError
from tokenmill.node.options import EngineOptions
from tokenmill.plan.policies import read_policies
from tokenmill.plugins import load
from tokenmill.plugins.groups import GROUPS, ROUTING_POLICIES
from tokenmill.sched.policies import order_named

EXAMPLES = {
    "tokenmill.routing_policies": "fewest_prompt_tokens",
    "tokenmill.scheduling_policies": "short-answers-first",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_examples(tmp_path_factory.mktemp("plugins"))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was found before is forgotten, as in a new process."""
    monkeypatch.delenv(load.VARIABLE, raising=False)
    yield
    load._load.cache_clear()
    load._entry_points.cache_clear()


@pytest.fixture
def examples(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(site)
    return site


def test_there_is_an_example_of_every_group(examples: Path) -> None:
    found = {each.group.name: each.name for each in load.installed() if each.package.startswith("tokenmill-")}
    assert found == EXAMPLES
    assert {group.name for group in GROUPS} >= set(found)


def test_policies_of_plugins_are_chosen_by_name(examples: Path) -> None:
    """Wherever ours are: by flags of a server and its engines, and in simulations."""
    engine = EngineOptions(scheduling_policy="short-answers-first")
    assert order_named(engine.scheduling_policy).summary == "fewest tokens to draw, with aging"
    routing = ServeOptions(routing_policy="fewest_prompt_tokens").routing_policy
    assert type(make_routing(routing, PrefixIndex())).__name__ == "FewestPromptTokens"
    chosen = read_policies(["fewest_prompt_tokens", "scheduling=short-answers-first"]).named
    assert chosen == {"routing": "fewest_prompt_tokens", "scheduling": "short-answers-first"}
    assert type(make_routing(chosen["routing"], PrefixIndex())).__name__ == "FewestPromptTokens"


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
    "no class": (f"{STATES}plugin = Plugin(1, 5)", "it provides 5, which is no class."),
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
