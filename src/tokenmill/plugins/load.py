"""Finding and loading plug-ins: entry points of installed packages, by group and name.

A name that is built in is never looked up, so no plug-in replaces what comes with tokenmill. Looking for names reads
the metadata of packages and imports nothing; only the plug-in that is wanted is imported, with the rights of the
process. TOKENMILL_PLUGINS=off in the environment (`--plugins off`), which processes that are started inherit, has none
looked at.

Entry points: https://packaging.python.org/specifications/entry-points/.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..core.errors import ConfigError
from .groups import GROUPS, Group, Plugin

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
VARIABLE = "TOKENMILL_PLUGINS"
ON, OFF = "on", "off"


class Installed(NamedTuple):
    """A plug-in as its package's metadata tell of it. package, version: of the distribution."""

    group: Group
    name: str
    package: str
    version: str


def are_on() -> bool:
    """Raises ConfigError for a variable that says neither."""
    said = os.environ.get(VARIABLE) or ON
    if said not in (ON, OFF):
        raise ConfigError(f"{VARIABLE} must be {ON} or {OFF}, got {said!r}.", param="plugins")
    return said == ON


def installed() -> list[Installed]:
    """All there are, by group and name. Nothing is imported."""
    found = ((group, each) for group in GROUPS for each in _entry_points(group))
    return sorted((Installed(group, each.name, *_source(each)) for group, each in found), key=_by_group)


def plugin_names(group: Group) -> list[str]:
    """Names of a group's plug-ins, where plug-ins are on. Nothing is imported."""
    return sorted({each.name for each in _entry_points(group)}) if are_on() else []


def load_plugin(group: Group, name: str, kind: type[T], *, param: str | None = None) -> T | None:
    """What the plug-in of this name provides, a `kind`; None where there is none, or plug-ins are off. Where it has a
    name itself, that is the same. param: the setting that names it. Raises ConfigError, in one line, for one that
    cannot be used."""
    found = _load(group, name, param) if are_on() else None
    if found is None:
        return None
    if not isinstance(found, kind):
        where = f"a {kind.__module__}.{kind.__qualname__}" if kind is not type else "a class"
        raise bad_plugin(group, name, f"it provides a {type(found).__name__}; it must be {where}.", param)
    called = name if kind is type else getattr(found, "name", name)
    if called != name:
        raise bad_plugin(group, name, f"what it provides is called {called!r}; the names must be equal.", param)
    return found


def bad_plugin(group: Group, name: str, why: str, param: str | None = None) -> ConfigError:
    """For one that does not provide what its group asks for. why: a sentence."""
    return ConfigError(f"The plug-in {name!r} of {group.name} cannot be used: {why}", param=param)


@cache
def _load(group: Group, name: str, param: str | None) -> Any:
    found = [each for each in _entry_points(group) if each.name == name]
    if not found:
        return None
    if len(found) > 1:
        packages = ", ".join(sorted(_source(each)[0] for each in found))
        why = f"several packages have one of this name ({packages}); uninstall all but one."
        raise bad_plugin(group, name, why, param)
    entry = found[0]
    package, version = _source(entry)
    try:
        plugin = entry.load()
    except (Exception, SystemExit) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise bad_plugin(group, name, f"loading {entry.value} of {package} {version} failed: {what}", param) from error
    if not isinstance(plugin, Plugin):
        why = f"{entry.value} is of type {type(plugin).__name__}; it must be a tokenmill.plugins.groups.Plugin."
        raise bad_plugin(group, name, why, param)
    if plugin.interface != group.interface:
        raise bad_plugin(
            group,
            name,
            f"{package} {version} was written for version {plugin.interface} of the interface, this tokenmill has"
            f" version {group.interface}; install a release of {package} for it.",
            param,
        )
    return plugin.provides


@cache
def _entry_points(group: Group) -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points

    return tuple(entry_points(group=group.name))


def _source(entry: EntryPoint) -> tuple[str, str]:
    """The distribution's name and version."""
    return (entry.dist.name, entry.dist.version) if entry.dist is not None else ("?", "?")


def _by_group(plugin: Installed) -> tuple[int, str, str]:
    return GROUPS.index(plugin.group), plugin.name, plugin.package
