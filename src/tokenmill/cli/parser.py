"""The parser: how flags are spelled, and how a wrong one is answered.

Names follow vLLM's, with llama.cpp's short forms beside them; what else their users type is looked up in `foreign`.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import Any, NoReturn

from ..node import foreign
from .spelling import spell

DEFAULT_MODEL = "smollm2"

_NUMBERED = re.compile(r"-[A-Za-z]+=?\d.*")


class Parser(argparse.ArgumentParser):
    """One line and exit code 2 on a wrong command line, with the nearest known flag or command."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """A mistyped command, like a mistyped flag, is told its nearest neighbour rather than all of them."""
        near = difflib.get_close_matches(str(value), [str(choice) for choice in action.choices or ()], n=1)
        if action.choices is not None and value not in action.choices and near:
            raise argparse.ArgumentError(action, f"there is no {value!r}; did you mean {near[0]}?")
        super()._check_value(action, value)

    def _get_option_tuples(self, option_string: str) -> Any:
        """Short flags are whole words, unless a number follows at once: -t4 is -t 4, but -tp is not -t p."""
        return super()._get_option_tuples(option_string) if _NUMBERED.fullmatch(option_string) else []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reports unknown flags from the parser that met them: only it knows which flags are near."""
        if self._subparsers is None and args is not None:
            args = spell(args, self._option_string_actions.__contains__)
        namespace, extras = super().parse_known_args(args, namespace)
        if extras:
            flag = extras[0].split("=")[0]
            known = [option for option in self._option_string_actions if option.startswith("--")]
            near = difflib.get_close_matches(flag, known, n=3)
            near.sort(key=lambda each: sorted(each) != sorted(flag))  # swapped letters are the likeliest slip
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unknown {'flag' if flag.startswith('-') else 'argument'} {flag}{hint}")
        return namespace, extras


class _Foreign(argparse.Action):
    """A flag of another server: refused by name, or accepted and said to have no effect."""

    def __init__(self, group: foreign.Group, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.group = group

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = [values] if isinstance(values, str) else []
        if self.group.asks_for_nothing(given):
            return
        if self.group.refused:
            parser.error(f"{' '.join([str(option_string), *given])}: {self.group.why}")
        print(f"tokenmill: {option_string} has no effect here: {self.group.why}.", file=sys.stderr)


class _Model(argparse.Action):
    """The model, as the first argument or by a flag, once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        known = getattr(namespace, "model_given", values)
        if known != values:
            parser.error(f"the model is named twice: {known} and {values}")
        namespace.model = namespace.model_given = values


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(model=DEFAULT_MODEL)
    parser.add_argument(
        "model",
        nargs="?",
        action=_Model,
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="alias, .gguf file, folder in Hugging Face format, or hub name org/name[:quant] (default: smollm2)",
    )
    parser.add_argument(
        "--model", "-m", action=_Model, default=argparse.SUPPRESS, metavar="MODEL", help="the same, as a flag"
    )


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Those of other servers that the parser has not got by now."""
    for group in foreign.GROUPS:
        flags = [flag for flag in group.flags.split() if flag not in parser._option_string_actions]
        if flags:
            parser.add_argument(
                *flags,
                action=_Foreign,
                group=group,
                nargs=None if group.num_values else 0,
                dest=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
