"""`audit keygen` makes the key that signs a log's head; `audit verify` tells whether a log is what was written."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..core.errors import ConfigError


def add_arguments(keygen: argparse.ArgumentParser, verify: argparse.ArgumentParser) -> None:
    keygen.add_argument("file", metavar="FILE", help="where the private key goes; FILE.pub gets the public one")
    verify.add_argument("file", metavar="FILE", help="the log, as --audit-log named it")
    verify.add_argument(
        "--public-key", metavar="FILE", action="append", default=[], help="that its heads are signed with (repeatable)"
    )
    verify.add_argument(
        "--head",
        metavar="HEAD",
        action="append",
        default=[],
        help="a head that was kept elsewhere: NUMBER:HASH or HASH (repeatable)",
    )
    verify.add_argument(
        "--begins-at", metavar="N", type=int, default=1, help="first entry, where older files were moved away"
    )


def keygen(args: argparse.Namespace) -> int:
    from ..control.signing import load_signer, make_key

    path = Path(args.file).expanduser()
    public = make_key(path)
    print(f"key {load_signer(str(path), 'FILE').key_id}: private {path} (mode 0600), public {public}")
    return 0


def verify(args: argparse.Namespace) -> int:
    """Exit code 0: it is; 1: it is not, with what is wrong."""
    from ..control.audit.chain import Tip
    from ..control.audit.verify import verify as look
    from ..control.signing import load_verifier

    if not args.public_key and not args.head:
        raise ConfigError("Give --public-key FILE or --head HEAD: by itself a log that was written anew looks right.")
    known = []
    for text in args.head:
        given = re.fullmatch(r"(?:(\d{1,18}):)?([0-9a-f]{64})", text)
        if given is None:
            raise ConfigError(f"--head must be NUMBER:HASH or HASH, got {text!r}.")
        known.append(Tip(int(given[1] or -1), given[2]))
    keys = [load_verifier(path, "--public-key") for path in args.public_key]
    try:
        found = look(Path(args.file).expanduser(), keys=keys, known=known, begins_at=args.begins_at)
    except OSError as error:
        raise ConfigError(f"{args.file} cannot be read: {error.strerror}.") from error
    for line in found.problems:
        print(f"wrong: {line}")
    for line in found.notes:
        print(f"note: {line}")
    print(
        f"{found.num_entries} entries, {found.first} to {found.last.seq}; {found.num_heads} signed heads, the newest "
        f"of entry {found.signed}; head {found.last}"
    )
    return 1 if found.problems else 0
