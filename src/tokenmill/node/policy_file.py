"""One's own policy from a Python file: FILE.py, or FILE.py:NAME where the file has several.

A policy is a class of the file with the methods of a protocol (core/policy.py and others); which one says what kind of
policy it is. Live servers and the simulator read the same files by this. The file runs with the rights of the process,
as any module does.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ..core.config import Kind, OwnPolicy
from ..core.errors import ConfigError

_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<name>\w+))?")


def is_policy_file(text: str) -> bool:
    """Whether a name of a policy means a file."""
    return _FILE.fullmatch(text) is not None


def own_policy(name: str, kind: Kind, param: str) -> str:
    """A policy's name as it is; where it means a file, with the policy of that kind in it. Raises ConfigError."""
    if isinstance(name, OwnPolicy) or not isinstance(name, str) or not is_policy_file(name):
        return name
    return read_policy(name, (kind,), param)[1]


def take_own_policies(given: Any, kinds: Mapping[str, Kind]) -> None:
    """Of an object of settings that is being made: read the policies of these fields that are in files. So it holds
    them in each process, whoever wrote the names down. Raises ConfigError."""
    for name, kind in kinds.items():
        object.__setattr__(given, name, own_policy(getattr(given, name), kind, name))


def read_policy(text: str, kinds: Iterable[Kind], param: str) -> tuple[Kind, OwnPolicy]:
    """FILE.py[:NAME] -> the policy and which of `kinds` it is. Raises ConfigError naming `param`."""
    found = _FILE.fullmatch(text)
    assert found is not None, text
    path, flag = Path(found["path"]).expanduser().resolve(), f"--{param.replace('_', '-')}"
    try:
        module = _run(path)
        known = {each.name: each for each in kinds}
        made = _class_of(module, found["name"], known, path)
        kind = known[_kind_name(made, known) or next(iter(known))]
        _check(made, kind)
    except _Unfit as error:
        raise ConfigError(f"{flag} {text}: {error}", param=param) from None
    return kind, OwnPolicy(f"{path}:{made.__name__}", partial(_make, made))


class _Unfit(Exception):
    """Its text says why a file gives no policy."""


def _run(path: Path) -> ModuleType:
    """The file as a module; a file that has been read is not run again."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise _Unfit(f"the file cannot be read: {error.strerror}.") from None
    name = f"tokenmill_policy_{blake2b(bytes(path) + source, digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except SyntaxError as error:
        del sys.modules[name]
        raise _Unfit(f"line {error.lineno} is no Python: {error.msg}.") from None
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _Unfit(f"running it failed: {type(error).__name__}: {error}") from None
    return module


def _class_of(module: ModuleType, name: str | None, kinds: dict[str, Kind], path: Path) -> type:
    """The class of this name, or the only one that is a policy."""
    own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    classes = {each.__name__: each for each in own}
    if name is not None:
        if name not in classes:
            near = difflib.get_close_matches(name, classes, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" It has {', '.join(classes) or 'none'}."
            raise _Unfit(f"the file has no class {name!r}.{hint}")
        return classes[name]
    able = {each: made for each, made in classes.items() if not each.startswith("_") and _kind_name(made, kinds)}
    if not able:
        wanted = "; ".join(f"{kind.name}: {', '.join(_functions(kind.protocol))}" for kind in kinds.values())
        raise _Unfit(f"no class in it has the methods of a policy ({wanted}).")
    if len(able) > 1:
        raise _Unfit(f"it has several policies, name one: {', '.join(f'{path.name}:{each}' for each in able)}.")
    return next(iter(able.values()))


def _kind_name(made: type, kinds: dict[str, Kind]) -> str | None:
    """The kind of which it has all methods, and as many as possible; else the one of which it has most."""
    best, found = (False, 0), None
    for kind in kinds.values():
        wanted = _functions(kind.protocol)
        num = sum(callable(getattr(made, name, None)) for name in wanted)
        if num and (num == len(wanted), num) > best:
            best, found = (num == len(wanted), num), kind.name
    return found


def _check(made: type, kind: Kind) -> None:
    what = f"{made.__name__} is no {kind.name} policy"
    members = {**vars(kind.protocol), **inspect.get_annotations(kind.protocol)}
    for name in members:
        if not name.startswith("_") and not hasattr(made, name):
            raise _Unfit(f"{what}: it has no {name}.")
    for name, wanted in _functions(kind.protocol).items():
        named = list(inspect.signature(wanted).parameters)
        try:
            inspect.signature(getattr(made, name)).bind(*named)
        except TypeError:
            raise _Unfit(f"{what}: {name} must take ({', '.join(named)}).") from None
    for parameter in _parameters(made):
        if parameter.default is parameter.empty and parameter.name not in kind.offered:
            offered = f"may take {' and '.join(kind.offered)}" if kind.offered else "must be made without arguments"
            raise _Unfit(f"{what}: {made.__name__}() wants {parameter.name}; it {offered}.")


def _functions(protocol: type) -> dict[str, Any]:
    return {
        name: each
        for name, each in vars(protocol).items()
        if isinstance(each, FunctionType) and not name.startswith("_")
    }


def _parameters(made: type) -> list[inspect.Parameter]:
    parameters = inspect.signature(made).parameters.values()
    return [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def _make(made: type, **offered: Any) -> Any:
    wanted = {each.name for each in _parameters(made)}
    return made(**{name: value for name, value in offered.items() if name in wanted})
