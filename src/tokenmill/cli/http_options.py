"""Flags of `serve` about HTTP: where it listens and for whom, keys, names, logs. And what they come to."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import ConfigError
from .options import DEFAULT_MODEL

if TYPE_CHECKING:
    import ssl

KEY_VARIABLES = ("TOKENMILL_API_KEY", "VLLM_API_KEY", "LLAMA_API_KEY")


def add_http_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTP")
    group.add_argument("--uds", metavar="PATH", help="listen on this Unix socket, for this user only, not on a port")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"clients must send it as a bearer token (repeatable; also from {', '.join(KEY_VARIABLES)})",
    )
    group.add_argument(
        "--api-key-file", metavar="FILE", help="keys, one a line: unlike --api-key no other user's ps shows them"
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="names in the API; answers carry the first (default: the model's own)",
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names that requests may have in their Host header besides this machine's, *.example.com for all below,"
        " '*' for any (default: any where others than this machine can connect, or with TLS)",
    )
    group.add_argument(
        "--root-path", "--api-prefix", default="", metavar="PATH", help="path under which a proxy shows this server"
    )
    group.add_argument("--ssl-certfile", "--ssl-cert-file", metavar="FILE", help="serve HTTPS with this certificate")
    group.add_argument(
        "--ssl-keyfile", "--ssl-key-file", metavar="FILE", help="its key (default: in the certificate's file)"
    )
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="authorities of clients' certificates")
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="clients' certificates: 0 unasked, 1 optional, 2 demanded (default: 0)",
    )
    group.add_argument(
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="log each request as it comes and as it ends, with lengths and times (default: off)",
    )
    group.add_argument(
        "--disable-log-requests", action="store_false", dest="enable_log_requests", help=argparse.SUPPRESS
    )
    group.add_argument(
        "--max-log-len",
        type=_count,
        default=0,
        metavar="N",
        help="with --enable-log-requests, log the first N characters of prompts too (default: 0)",
    )
    group.add_argument(
        "--disable-access-log", "--disable-uvicorn-access-log", action="store_true", help="log no line per answer"
    )


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a number of characters, at least 0, got {text!r}.")


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Those of flags, file and environment together, each once."""
    keys = [*args.api_key]
    if args.api_key_file is not None:
        try:
            lines = Path(args.api_key_file).read_text(encoding="utf8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--api-key-file {args.api_key_file} cannot be read: {error}.", param="api_key_file"
            ) from error
        from_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not from_file:
            raise ConfigError(f"--api-key-file {args.api_key_file} has no key.", param="api_key_file")
        keys += from_file
    keys += [key for name in KEY_VARIABLES if (key := os.environ.get(name, ""))]
    if not all(key.isascii() and key.isprintable() and key == key.strip() for key in keys):
        raise ConfigError("An API key must be of printable ASCII characters, none of them a space at an end.")
    return tuple(dict.fromkeys(keys))


def model_names(args: argparse.Namespace, own: str) -> tuple[str, ...]:
    """Those given, or the model's own. The last of several may be a model that was meant as such: argparse gives all
    that follows the flag to the flag."""
    from ..formats.hub import ALIASES

    names = list(dict.fromkeys(args.served_model_name))
    if not names:
        return (own,)
    last = names[-1]
    if args.model == DEFAULT_MODEL and len(names) > 1 and (last in ALIASES or os.path.exists(last)):
        raise ConfigError(
            f"Is {last} the model? Then put it before --served-model-name, which takes all that follows it.",
            param="served_model_name",
        )
    return tuple(names)


def allowed_hosts(args: argparse.Namespace) -> tuple[str, ...] | None:
    """None: any. With TLS the name is vouched for by the certificate; others' machines know this one by names that
    it need not know itself; and no web page reaches a Unix socket."""
    from ..server.listen import is_loopback

    if args.allowed_hosts is not None:
        return tuple(args.allowed_hosts)
    return () if not (args.uds or args.ssl_certfile) and is_loopback(args.host) else None


def tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    from ..server.listen import make_tls

    if args.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --ssl-certfile.", param=name)
        if args.ssl_cert_reqs:
            raise ConfigError("--ssl-cert-reqs needs --ssl-certfile.", param="ssl_cert_reqs")
        return None
    if args.ssl_cert_reqs and args.ssl_ca_certs is None:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs.", param="ssl_cert_reqs")
    return make_tls(args.ssl_certfile, args.ssl_keyfile or "", args.ssl_ca_certs or "", args.ssl_cert_reqs)


def set_access_log(args: argparse.Namespace) -> None:
    from ..server.access_log import ACCESS_LOGGER

    if args.disable_access_log:
        logging.getLogger(ACCESS_LOGGER).setLevel(logging.CRITICAL)


def shown_address(args: argparse.Namespace, host: str, port: int) -> str:
    """What to tell a user who wants to connect."""
    scheme = "http" if args.ssl_certfile is None else "https"
    if args.uds:
        return f"Unix socket {host} (curl --unix-socket {host} {scheme}://localhost{args.root_path}/v1/models)"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{args.root_path}"
