"""The flags of `keys` and `tenants`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..control.tenants.settings import TenantSettings
from .keys import duration
from .options import add_options, argument_type
from .parser import Parser

Command = Callable[[Any, str, str, str, str], Parser]
"""(sub-commands, name, about, module, function) -> its parser"""


def add_key_commands(commands: argparse._SubParsersAction, command: Command) -> None:
    keys = commands.add_parser("keys", help="who may call a server", description="Who may call a server.")
    of_keys = keys.add_subparsers(title="commands", metavar="COMMAND", required=True)
    create = command(of_keys, "create", "make an API key and print it as the last word", "keys", "create")
    create.add_argument("key_name", metavar="NAME", help="what people call the key")
    create.add_argument("--tenant", metavar="T", help="the tenant whose it is, made if it is not there (default: NAME)")
    create.add_argument("--admin", action="store_true", help="it manages tenants, keys and the server too")
    create.add_argument(
        "--expires-in", type=argument_type(duration), default=0, metavar="TIME", help="such as 30d (default: never)"
    )
    _settings(create, "settings of a tenant that is made")
    listed = command(of_keys, "list", "list API keys", "keys", "list_keys")
    listed.add_argument("--tenant", metavar="T", help="of this one only")
    listed.add_argument("--all", action="store_true", help="those that are revoked or expired too")
    rotate = command(of_keys, "rotate", "replace an API key and print the new one as the last word", "keys", "rotate")
    rotate.add_argument("key", metavar="KEY", help="its id or name")
    rotate.add_argument(
        "--overlap", type=argument_type(duration), default=0, metavar="TIME",
        help="let the old one be used so long, such as 15m (default: not at all)",
    )  # fmt: skip
    revoke = command(of_keys, "revoke", "end an API key", "keys", "revoke")
    revoke.add_argument("key", metavar="KEY", help="its id, or the name of all that have it")

    tenants = commands.add_parser("tenants", help="what each tenant may use", description="What each tenant may use.")
    of_tenants = tenants.add_subparsers(title="commands", metavar="COMMAND", required=True)
    made = command(of_tenants, "create", "make a tenant", "keys", "create_tenant")
    changed = command(of_tenants, "set", "change what a tenant may use", "keys", "set_tenant")
    shown = command(of_tenants, "show", "show a tenant", "keys", "show_tenant")
    deleted = command(of_tenants, "delete", "delete a tenant and revoke its keys", "keys", "delete_tenant")
    for parser in (made, changed, shown, deleted):
        parser.add_argument("tenant", metavar="TENANT", help="its id")
    for parser in (made, changed):
        _settings(parser, "settings")
    all_tenants = command(of_tenants, "list", "list tenants", "keys", "list_tenants")
    for parser in (create, listed, rotate, revoke, made, changed, shown, deleted, all_tenants):
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument(
            "--tenants",
            metavar="FILE",
            help="that serve --tenants has (default: control.db in the user's state folder)",
        )


def _settings(parser: Parser, title: str) -> None:
    """What is not given is not in the namespace."""
    group = parser.add_argument_group(title)
    add_options(group, TenantSettings)
    for action in group._group_actions:
        action.default = argparse.SUPPRESS
