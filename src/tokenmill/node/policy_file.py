"""Policies that do not come with us: from a Python file, as FILE.py or FILE.py:NAME where the file has several, or a
plug-in's, by name.

A policy of a file is a class with the methods of a protocol (core/policy.py and others); which one says what kind of
policy it is. Live servers and the simulator read the same files and plug-ins by this. Either runs with the rights of
the process, as any module does.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.config import Kind, OwnPolicy, check_name
from ..core.errors import ConfigError
from ..core.options import options_of
from ..plugins.fit import Unfit, check_class, functions_of, make_of
from ..plugins.groups import ROUTING_POLICIES, SCHEDULING_POLICIES, Group
from ..plugins.load import are_on, bad_plugin, load_plugin, plugin_names

_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<name>\w+))?")
GROUPS: Mapping[str, Group] = {"routing": ROUTING_POLICIES, "scheduling": SCHEDULING_POLICIES}
"""Kinds of policies that plug-ins may add."""


def is_policy_file(text: str) -> bool:
    """Whether a name of a policy means a file."""
    return _FILE.fullmatch(text) is not None


def own_policy(name: str, kind: Kind, param: str, known: Collection[str], shown: str = "") -> str:
    """A policy's name as it is, if it is one of `known`; where it means a file or a plug-in, with the policy of that
    kind in it. shown: what the user calls `param`. Raises ConfigError."""
    if isinstance(name, OwnPolicy) or not isinstance(name, str) or name in known:
        return name
    if is_policy_file(name):
        return read_policy(name, (kind,), param)[1]
    found = _plugin_policy(name, kind, param)
    if found is None:
        off = " (plug-ins are off)" if kind.name in GROUPS and not are_on() else ""
        check_name(name, (*known, *policy_names(kind)), param, f"{shown or _flag(param)}{off}")
    return found or name


def policy_names(kind: Kind) -> list[str]:
    """Of plug-ins, none of which is imported."""
    return plugin_names(GROUPS[kind.name]) if kind.name in GROUPS else []


def _plugin_policy(name: str, kind: Kind, param: str) -> OwnPolicy | None:
    """The plug-in of that kind and name; None where there is none. Raises ConfigError."""
    group = GROUPS.get(kind.name)
    made = None if group is None else load_plugin(group, name, type, param=param)
    if group is None or made is None:
        return None
    try:
        check_class(made, kind.protocol, f"{kind.name} policy", kind.offered)
    except Unfit as error:
        raise bad_plugin(group, name, str(error), param) from None
    return OwnPolicy(name, partial(make_of, made), str(getattr(sys.modules.get(made.__module__), "__file__", "")))


def take_own_policies(given: Any, kinds: Mapping[str, Kind]) -> None:
    """Of an object of settings that is being made: read the policies of these fields that do not come with us. So it
    holds them in each process, whoever wrote the names down. Raises ConfigError."""
    declared = options_of(type(given))
    for name, kind in kinds.items():
        object.__setattr__(given, name, own_policy(getattr(given, name), kind, name, declared[name][0].choices))


def read_policy(text: str, kinds: Iterable[Kind], param: str) -> tuple[Kind, OwnPolicy]:
    """FILE.py[:NAME] -> the policy and which of `kinds` it is. Raises ConfigError naming `param`."""
    found = _FILE.fullmatch(text)
    assert found is not None, text
    path = Path(found["path"]).expanduser().resolve()
    try:
        module = _run(path)
        known = {each.name: each for each in kinds}
        made = _class_of(module, found["name"], known, path)
        kind = known[_kind_name(made, known) or next(iter(known))]
        check_class(made, kind.protocol, f"{kind.name} policy", kind.offered)
    except Unfit as error:
        raise ConfigError(f"{_flag(param)} {text}: {error}", param=param) from None
    return kind, OwnPolicy(f"{path}:{made.__name__}", partial(make_of, made), str(path))


def _flag(param: str) -> str:
    return f"--{param.replace('_', '-')}"


def _run(path: Path) -> ModuleType:
    """The file as a module; a file that has been read is not run again."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise Unfit(f"the file cannot be read: {error.strerror}.") from None
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
        raise Unfit(f"line {error.lineno} is no Python: {error.msg}.") from None
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise Unfit(f"running it failed: {type(error).__name__}: {error}") from None
    return module


def _class_of(module: ModuleType, name: str | None, kinds: dict[str, Kind], path: Path) -> type:
    """The class of this name, or the only one that is a policy."""
    own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    classes = {each.__name__: each for each in own}
    if name is not None:
        if name not in classes:
            near = difflib.get_close_matches(name, classes, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" It has {', '.join(classes) or 'none'}."
            raise Unfit(f"the file has no class {name!r}.{hint}")
        return classes[name]
    able = {each: made for each, made in classes.items() if not each.startswith("_") and _kind_name(made, kinds)}
    if not able:
        wanted = "; ".join(f"{kind.name}: {', '.join(functions_of(kind.protocol))}" for kind in kinds.values())
        raise Unfit(f"no class in it has the methods of a policy ({wanted}).")
    if len(able) > 1:
        raise Unfit(f"it has several policies, name one: {', '.join(f'{path.name}:{each}' for each in able)}.")
    return next(iter(able.values()))


def _kind_name(made: type, kinds: dict[str, Kind]) -> str | None:
    """The kind of which it has all methods, and as many as possible; else the one of which it has most."""
    best, found = (False, 0), None
    for kind in kinds.values():
        wanted = functions_of(kind.protocol)
        num = sum(callable(getattr(made, name, None)) for name in wanted)
        if num and (num == len(wanted), num) > best:
            best, found = (num == len(wanted), num), kind.name
    return found
