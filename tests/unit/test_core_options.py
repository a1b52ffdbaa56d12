"""An option is declared once: its flag, its LLM keyword, its default and its range follow from the declaration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest

from tokenmill.cli.options import add_options, given_options
from tokenmill.cli.parser import Parser
from tokenmill.core.errors import ConfigError
from tokenmill.core.options import check, option, options_of, seconds, size
from tokenmill.kv.store.options import TierOptions
from tokenmill.llm.arguments import read_options
from tokenmill.node.options import EngineOptions, TextOptions


@dataclass(frozen=True)
class Wishes:
    num_cups: int | None = option(None, "cups of tea, 100% hot", also="-k --cups", metavar="N", least=1)
    sugar: str = option("none", "how sweet", choices=("none", "much"))
    wait_s: float = option(2.0, "seconds", read=seconds)
    room: int = option(0, "bytes", read=size, flag="--pantry")
    guests: tuple[str, ...] = option((), "names", several="all")
    milk: bool = option(True, "with milk")
    is_loud: bool = option(False, "sing", has_no=True)
    secret: str = "no option"

    def __post_init__(self) -> None:
        check(self)


def parse(*argv: str) -> Wishes:
    parser = Parser(prog="tea")
    add_options(parser, Wishes)
    assert "100% hot" in parser.format_help()
    return given_options(Wishes, parser.parse_args(argv))


def test_flags_become_the_object_that_declares_them() -> None:
    assert parse() == Wishes()
    assert parse("-k3", "--sugar=much", "--wait-s", "0.5", "--pantry", "2KiB", "--no-milk", "--is-loud") == Wishes(
        num_cups=3, sugar="much", wait_s=0.5, room=2048, milk=False, is_loud=True
    )
    assert parse("--guests", "ann", "bob", "--guests", "cid").guests == ("ann", "bob", "cid")
    assert parse("--cups", "2", "--is-loud", "--no-is-loud") == Wishes(num_cups=2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_cups": 0}, "--num-cups must be at least 1, got 0"),
        ({"num_cups": "3"}, "num_cups must be int or None, got str"),
        ({"num_cups": True}, "num_cups must be int or None, got bool"),
        ({"sugar": "some"}, "--sugar must be one of none, much, got 'some'"),
        ({"sugar": None}, "sugar must be str, got NoneType"),
        ({"milk": 1}, "milk must be bool, got int"),
        ({"wait_s": "1"}, "wait_s must be float, got str"),
    ],
)
def test_a_wrong_value_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Wishes(**given)
    assert caught.value.param == next(iter(given))


def test_a_wrong_text_is_answered_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--wait-s", "-1"], ["--pantry", "big"], ["--sugar", "mich"], ["--num-cups", "x"]):
        with pytest.raises(SystemExit):
            parse(*argv)
    said = capsys.readouterr().err
    assert "at least 0" in said and "must be a size" in said and "did you mean much" in said


def test_every_option_of_a_node_is_a_flag_and_a_keyword() -> None:
    for kind in (EngineOptions, TextOptions, TierOptions):
        parser = Parser(prog="x")
        add_options(parser, kind)
        declared = options_of(kind)
        assert declared.keys() == {field.name for field in fields(kind)}
        for name, (option_, default, _) in declared.items():
            assert set(option_.flags(name)) <= parser._option_string_actions.keys()
            assert read_options({name: default}) == read_options({})
