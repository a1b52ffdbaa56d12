"""`verify-response`: whether a server signed an answer, and what it says of it."""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path

from ..core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--request", metavar="FILE", required=True, help="the body that was sent, byte for byte")
    parser.add_argument("--response", metavar="FILE", required=True, help="the body that came, byte for byte")
    parser.add_argument(
        "--signature",
        metavar="TEXT",
        help="what the header x-tokenmill-signature had (default: at the end of a stream)",
    )
    parser.add_argument(
        "--public-key", metavar="FILE", required=True, help="PEM, or what /.well-known/jwks.json of the server gave"
    )


def verify_response(args: argparse.Namespace) -> int:
    """Exit code 0: it is; 1: it is not, with the reason."""
    from ..control.signing import BadSignature, check, take_comment

    request, response = (_read(path) for path in (args.request, args.response))
    token = args.signature
    key = _key(args.public_key)
    try:
        if token is None:
            response, token = take_comment(response)
        facts = check(token, key, request, response)
    except BadSignature as error:
        print(f"wrong: {error}")
        return 1
    print(json.dumps(facts, indent=2, sort_keys=True))
    return 0


def _key(path: str):  # type: ignore[no-untyped-def]
    from ..control.signing import load_verifier, verifier_of

    data = _read(path)
    if not data.lstrip().startswith(b"{"):
        return load_verifier(path, "--public-key")
    try:
        text = json.loads(data)["keys"][0]["x"]
        return verifier_of(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"--public-key {path} has no Ed25519 key.") from error


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
