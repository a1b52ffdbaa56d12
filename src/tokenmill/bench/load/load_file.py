"""A load as a file: flags of `bench serve` by their names, in TOML, so that one file drives a server and a simulation.

    request-rate = 4
    dataset-name = "trace"
    dataset-path = "conversation_trace.jsonl"

What the command line says goes before what the file says. A flag of when requests are sent puts all of those of the
file out of force, and a data set those of its data set and of when its requests are sent. Paths are taken from the
file's folder.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError

NOT_LOADS = {
    "url", "api_key", "header", "ca_file", "insecure", "metrics_url", "json", "csv", "html", "trace", "beside", "help",
    "load", "policy", "sweep", "against", "speed_factor", "no_fast_path",
}  # fmt: skip
"""Of a server, of what is simulated, or a place for results: not of a load."""


ARRIVALS = {
    "request_rate", "concurrency", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "sweep_rates",
    "sweep_concurrency",
}  # fmt: skip
"""When requests are sent: one question, that only one may answer."""
DATA = {
    "dataset_name", "dataset_path", "random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len",
    "random_batch_size", "num_prefixes", "prefix_len", "num_turns", "think_time", "system_len", "text_column",
    "sharegpt_output_len", "length_scale", "max_model_len", "trace_spread", "trace_sample", "trace_start", "day",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Given:
    """A file that was named, until the whole command line is known (`settle`)."""

    path: Path
    table: dict[str, Any]
    parser: argparse.ArgumentParser


def settle(args: argparse.Namespace) -> None:
    """Take what the file of --load says, if one was named and that has not been done. Raises ConfigError."""
    given = getattr(args, "load", None)
    if isinstance(given, Given):
        args.load = given.path
        apply_load(given.parser, args, given.table, str(given.path), given.path.parent)


class LoadFile(argparse.Action):
    """`--load FILE`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        path = Path(str(values))
        try:
            table = tomllib.loads(path.read_text(encoding="utf8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{path} cannot be read as a load: {reason}.", param="load") from None
        setattr(namespace, self.dest, Given(path, table, parser))


def given_flags(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> list[argparse.Action]:
    """Those with another value than their default, in the order in which they were added."""
    return [each for each in parser._actions if getattr(namespace, each.dest, each.default) != each.default]


def apply_load(
    parser: argparse.ArgumentParser,
    namespace: argparse.Namespace,
    table: Mapping[str, Any],
    where: str,
    folder: Path = Path(),
) -> None:
    """Set what `table` says, as far as `namespace` leaves it open. Raises ConfigError that names the key."""
    settle(namespace)
    given = {action.dest for action in given_flags(parser, namespace)}
    shut = {*ARRIVALS, "max_concurrency"} if given & {*ARRIVALS, "dataset_name"} else set()
    shut |= DATA if "dataset_name" in given else set()
    known = {
        option.removeprefix("--"): action
        for option, action in parser._option_string_actions.items()
        if option.startswith("--") and action.dest not in NOT_LOADS
    }
    for key, value in table.items():
        action = known.get(key.replace("_", "-"))
        if action is None:
            near = difflib.get_close_matches(key.replace("_", "-"), known, n=1)
            hint = f": did you mean {near[0]}?" if near else "."
            raise ConfigError(f"{where}: {key} is no setting of a load{hint}", param=key)
        found = _value(parser, action, key, value, where)
        if action.type is Path and not Path(found).is_absolute():
            found = folder / found
        if action.dest not in given | shut:
            setattr(namespace, action.dest, found)


def _value(parser: argparse.ArgumentParser, action: argparse.Action, key: str, value: Any, where: str) -> Any:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: {key} is true or false, not {value!r}.", param=key)
        return value
    several = value if isinstance(value, list) else [value]
    is_list = action.nargs in ("+", "*")
    # Flags that take numbers with commas between them are written as lists.
    texts = [str(each) for each in several] if is_list else [",".join(str(each) for each in several)]
    if isinstance(value, bool | dict) or not texts:
        raise ConfigError(f"{where}: {key} is a number or a text, not {value!r}.", param=key)
    try:
        found = [parser._get_value(action, text) for text in texts]
        for each in found:
            parser._check_value(action, each)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{where}: {key}: {error.message}.", param=key) from None
    return found if is_list else found[0]
