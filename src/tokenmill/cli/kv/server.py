"""A running server, as `tokenmill kv` asks it over HTTP, and the KV store of this machine that it uses."""

from __future__ import annotations

import argparse
import http.client
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, InvalidRequest, Unavailable
from ..serve_options import KEY_VARIABLES
from ..server_url import read_url
from .parser import URL

LONGEST_S = 3600.0
"""A long document is computed in minutes."""


class Server:
    """Raises ConfigError for what is no address."""

    def __init__(self, url: str, key: str) -> None:
        self._url = read_url(url, "--url", URL)
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self.url = url

    def ask(self, path: str, body: Any = None) -> Any:
        """The answer; `body` None: GET. Raises Unavailable, and InvalidRequest with what the server says."""
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        with closing(self._url.connect(LONGEST_S)) as connection:
            try:
                connection.request(method, self._url.base + path, data, self._headers)
                response = connection.getresponse()
                text = response.read()
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"There is no answer from {self.url} ({error}).") from None
        if response.status == 200:
            return json.loads(text)
        raise InvalidRequest(_message(text) or f"{self.url} answered {response.status} to {path}.")


def _message(text: bytes) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def server_of(args: argparse.Namespace) -> Server:
    return Server(args.url or URL, args.api_key or os.environ.get(KEY_VARIABLES[0], ""))


def socket_of(args: argparse.Namespace) -> str:
    """Of the KV store that is meant. Raises ConfigError where it is not on this machine."""
    if args.kv_store is not None:
        if args.url is not None:
            raise ConfigError("Give --url or --kv-store, not both.", param="kv_store")
        return str(Path(args.kv_store).expanduser())
    server = server_of(args)
    socket = str(server.ask("/admin/kv/tiers").get("socket", ""))
    if not os.path.exists(socket):
        raise ConfigError(f"The KV store of {server.url} is on another machine: do this there.", param="url")
    return socket
