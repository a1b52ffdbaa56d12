"""Tables of the flags of `tokenmill serve` and of those of other servers, for docs/use/api.md."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

import api_doc_words as words
from markdown_tables import code, codes, grouped, table
from tokenmill.cli import parser as spelling
from tokenmill.cli.main import _parser
from tokenmill.cli.parser import _Foreign
from tokenmill.node import foreign


def serve_parser() -> argparse.ArgumentParser:
    parser = _parser([])
    assert parser._subparsers is not None
    choices = parser._subparsers._group_actions[0].choices
    assert isinstance(choices, dict)
    serve: argparse.ArgumentParser = choices["serve"]
    return serve


def own_flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A table for each group of flags, with the help that the command shows."""
    titles = {"positional arguments": "Model", "options": ""}
    rows: list[tuple[str, ...]] = []
    for group in parser._action_groups:
        title = titles.get(group.title or "", f"{group.title}"[:1].upper() + f"{group.title}"[1:])
        if title:
            rows = []
        rows += [_flag(parser, action) for action in group._group_actions if _is_shown(action)]
        if rows and group.title != "positional arguments":
            yield f"### {title or 'Model'}"
            yield from table("flag", "value", "meaning", rows=rows)


def _is_shown(action: argparse.Action) -> bool:
    return action.help not in (argparse.SUPPRESS, None) and "--help" not in action.option_strings


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str, str]:
    if action.choices is not None:
        value = codes(str(choice) for choice in action.choices)
    else:
        several = " ..." if action.nargs == "+" else ""
        value = "" if action.nargs == 0 or not action.metavar else f"{action.metavar}{several}"
    name = codes(action.option_strings) or str(action.metavar)
    return name, value, parser._get_formatter()._expand_help(action)


def foreign_flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    own = parser._option_string_actions
    both = [flag for flag in spelling.SPELLED if isinstance(own.get(flag), _Foreign)]
    assert not both, f"said to have no effect, and spelled as ours: {both}"
    yield "### Other names of our flags"
    spelled = {flag: target for flag, target in spelling.SPELLED.items() if flag not in own} | words.HIDDEN
    hidden = {flag for flag, action in own.items() if action.help in (argparse.SUPPRESS, None)}
    hidden -= {flag for flag, action in own.items() if isinstance(action, _Foreign)}
    assert hidden == words.HIDDEN.keys(), f"flags that nothing tells of: {sorted(hidden ^ words.HIDDEN.keys())}"
    yield from table(
        "flag", "same as", rows=((flags, code(" ".join(target))) for target, flags in grouped(spelled.items()))
    )
    sizes = ((f"{flag} N", f"{target} N{unit}") for flag, (target, unit) in spelling.SIZES.items())
    yield "### Sizes of other servers"
    rows = ((flags, code(target)) for target, flags in grouped(sizes))
    yield from table("flag", "same as", rows=rows)
    yield "### Values of other servers"
    foreign_values = {flag: values for flag, values in spelling.SPELLED_VALUES.items() if flag not in own}
    valued = [
        (f"{flag} {'|'.join(value.strip('`') for value in given.split(', '))}", target)
        for flag, values in (*foreign_values.items(), *spelling.OWN_VALUES.items())
        for target, given in grouped(values.items())
    ]
    rows = ((flags, code(" ".join(target)) if target else "asks for nothing") for target, flags in grouped(valued))
    yield from table("flag with value", "same as", rows=rows)
    groups = [
        (flag, action.group)
        for action in dict.fromkeys(own.values())
        if isinstance(action, _Foreign)
        for flag in action.option_strings
    ]
    yield "### Accepted, without effect"
    yield "The server starts and says so in a line, except where the value asks for nothing."
    yield from _groups("why", [(flag, group) for flag, group in groups if not group.refused])
    yield "### Refused"
    yield "The server does not start, except where the value asks for nothing."
    yield from _groups("why, and what to do", [(flag, group) for flag, group in groups if group.refused])


def _groups(head: str, groups: Iterable[tuple[str, foreign.Group]]) -> Iterator[str]:
    alike = grouped((flag, (group.why, group.neutral)) for flag, group in groups)
    yield from table("flags", head, "asks for nothing", rows=((f, why, codes(neutral)) for (why, neutral), f in alike))


def commands_and_environment() -> Iterator[str]:
    yield "### Commands"
    yield "Of other servers, each refused with what to do here:"
    yield from table("command", "here", rows=((code(name), text) for name, text in foreign.COMMANDS.items()))
    yield "### Environment"
    yield "Variables of other servers are not read. Where one is set, the start says so and names what to give:"
    rows = ((code(name), text.replace("{}", "VALUE")) for name, text in foreign.ENVIRONMENT.items())
    yield from table("variable", "instead", rows=rows)
