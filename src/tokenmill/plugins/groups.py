"""What plug-ins may add: a group of entry points for each kind, the version of its interface, and how a plug-in states
the one that it was written for.

A group's version is raised when a plug-in that was written for the last one may no longer work. What a plug-in of each
group provides is told in docs/develop/write-a-plugin.md, and checked by who uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Plugin:
    """What an entry point names.

    interface  version of its group's interface that it was written for: a number, not Group.interface, which changes
    provides   what the group asks for
    """

    interface: int
    provides: Any


@dataclass(frozen=True, slots=True)
class Group:
    """name     of the group of entry points
    interface  version of what is asked of its plug-ins
    named_by   what a user names one by
    """

    name: str
    interface: int
    named_by: str


ROUTING_POLICIES = Group("tokenmill.routing_policies", 1, "--routing-policy")
SCHEDULING_POLICIES = Group("tokenmill.scheduling_policies", 1, "--scheduling-policy")
TOOL_PARSERS = Group("tokenmill.tool_parsers", 1, "--tool-call-parser")
REASONING_PARSERS = Group("tokenmill.reasoning_parsers", 1, "--reasoning-parser")
FAMILIES = Group("tokenmill.families", 1, "the checkpoint's architecture")
KV_BACKENDS = Group("tokenmill.kv_backends", 1, "the scheme of --kv-remote")
OBSERVERS = Group("tokenmill.observers", 1, "--observer")

GROUPS = (
    ROUTING_POLICIES,
    SCHEDULING_POLICIES,
    TOOL_PARSERS,
    REASONING_PARSERS,
    FAMILIES,
    KV_BACKENDS,
    OBSERVERS,
)
