"""Whether a class that others wrote is what a protocol asks for, told before it is used."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from types import FunctionType
from typing import Any


class Unfit(Exception):
    """Its text says, as a sentence, why something is not what was asked for."""


def functions_of(protocol: type) -> dict[str, Any]:
    """The methods that a protocol asks for, by name."""
    return {
        name: each
        for name, each in vars(protocol).items()
        if isinstance(each, FunctionType) and not name.startswith("_")
    }


def check_methods(made: type, protocol: type, what: str) -> None:
    """Raises Unfit where `made` lacks one or it cannot be called as the protocol's. what: what it should be."""
    for name, wanted in functions_of(protocol).items():
        if not hasattr(made, name):
            raise Unfit(f"{made.__name__} is no {what}: it has no {name}.")
        named = list(inspect.signature(wanted).parameters)
        try:
            inspect.signature(getattr(made, name)).bind(*named)
        except TypeError:
            raise Unfit(f"{made.__name__} is no {what}: {name} must take ({', '.join(named)}).") from None
        except ValueError:  # compiled, and does not say what it takes
            continue


def check_class(made: type, protocol: type, what: str, offered: Collection[str] = ()) -> None:
    """As check_methods, of all members of the protocol; `made` may want no argument but those that are offered."""
    for name in {**vars(protocol), **inspect.get_annotations(protocol)}:
        if not name.startswith("_") and not hasattr(made, name):
            raise Unfit(f"{made.__name__} is no {what}: it has no {name}.")
    check_methods(made, protocol, what)
    for parameter in _parameters(made):
        if parameter.default is parameter.empty and parameter.name not in offered:
            told = f"may take {' and '.join(offered)}" if offered else "must be made without arguments"
            raise Unfit(f"{made.__name__} is no {what}: {made.__name__}() wants {parameter.name}; it {told}.")


def make_of(made: type, **offered: Any) -> Any:
    """A new one, of what it takes of what is offered."""
    wanted = {each.name for each in _parameters(made)}
    return made(**{name: value for name, value in offered.items() if name in wanted})


def _parameters(made: type) -> list[inspect.Parameter]:
    """None of a class that is compiled, or made as one is, and does not say what it takes."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except ValueError:
        return []
    return [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
