"""Values as objects of an S3-compatible store, or as files of a folder that machines share.

Credentials are found where Amazon's tools find them: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, roles of machines.
Options of s3://: endpoint (of a store that is not Amazon's), region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ....core.errors import ConfigError
from ....core.units import KiB
from .backend import PARAM, Address, Buffer

if TYPE_CHECKING:
    from obstore.store import LocalStore, S3Store

TIMEOUT = "5s"
CONNECT_TIMEOUT = "2s"


class ObjectBackend:
    SCHEMES = ("s3", "file")
    OPTIONS = ("endpoint", "region")

    look_names = 16
    look_s = 1.0
    batch_bytes = 64 * KiB
    """One value at a time: they are fetched beside each other."""

    def __init__(self, address: Address) -> None:
        self.name = address.name
        self._is_far = address.url.scheme != "file"
        self.num_threads = 32 if self._is_far else 4
        self._store = _local(address) if address.url.scheme == "file" else _s3(address)

    def check(self, limit_s: float) -> None:
        self.has(["check"], limit_s)

    def has(self, names: Sequence[str], limit_s: float) -> list[bool]:
        """Of a store in the network, each question to which takes long, only as many as it takes to find an end."""
        if not self._is_far:
            return [self._has(name) for name in names]
        num_there = self._num_there(names)
        return [nth < num_there for nth in range(len(names))]

    def get(
        self, names: Sequence[str], most_bytes: int, take: Callable[[int, memoryview], None], limit_s: float
    ) -> None:
        for nth, name in enumerate(names):
            try:
                with _as_os_errors():
                    found = self._store.get(name)
                    value = memoryview(found.bytes() if found.meta["size"] <= most_bytes else b"")
            except FileNotFoundError:
                continue
            take(nth, value)

    def put(self, values: Sequence[tuple[str, Buffer]], limit_s: float) -> list[bool]:
        for name, value in values:
            with _as_os_errors():
                self._store.put(name, value, use_multipart=False)
        return [True] * len(values)

    def delete(self, names: Sequence[str], limit_s: float) -> None:
        for name in names:
            try:
                with _as_os_errors():
                    self._store.delete(name)
            except FileNotFoundError:
                pass

    def close(self) -> None:
        pass

    def _num_there(self, names: Sequence[str]) -> int:
        """How many lead: what lies between two that are there is taken to be there."""
        if not names or not self._has(names[0]):
            return 0
        there, absent = 0, len(names) - 1
        if absent == 0 or self._has(names[absent]):
            return len(names)
        while absent - there > 1:
            middle = (there + absent) // 2
            if self._has(names[middle]):
                there = middle
            else:
                absent = middle
        return there + 1

    def _has(self, name: str) -> bool:
        try:
            with _as_os_errors():
                self._store.head(name)
        except FileNotFoundError:
            return False
        return True


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Only the first line of what the package says: the others may quote a request."""
    from obstore.exceptions import BaseError, NotFoundError

    try:
        yield
    except NotFoundError as error:
        raise FileNotFoundError from error
    except BaseError as error:
        raise OSError(str(error).partition("\n")[0][:200]) from error


def _local(address: Address) -> LocalStore:
    stores = _stores()
    folder = unquote(address.url.path)
    if address.url.netloc or not folder.strip("/"):
        raise ConfigError("--kv-remote: file:// takes the path of a folder, as in file:///mnt/kv", param=PARAM)
    try:
        return stores.LocalStore(folder, mkdir=True)
    except Exception as error:
        raise ConfigError(f"--kv-remote: {address.name} cannot be used: {error}", param=PARAM) from error


def _s3(address: Address) -> S3Store:
    stores = _stores()
    endpoint = address.options.get("endpoint", "")
    config: dict[str, Any] = {"virtual_hosted_style_request": "false"} if endpoint else {}
    if endpoint:
        config["endpoint"] = endpoint
    if region := address.options.get("region"):
        config["region"] = region
    try:
        return stores.S3Store(
            address.url.hostname or "",
            prefix=unquote(address.url.path).strip("/") or None,
            config=config,
            client_options={
                "timeout": TIMEOUT,
                "connect_timeout": CONNECT_TIMEOUT,
                "allow_http": endpoint.startswith("http://"),
            },
            retry_config={"max_retries": 1},
        )
    except Exception as error:
        raise ConfigError(f"--kv-remote: {address.name} cannot be used: {error}", param=PARAM) from error


def _stores() -> Any:
    try:
        import obstore.store
    except ImportError as error:
        raise ConfigError(
            "--kv-remote s3:// and file:// need the package obstore: pip install 'tokenmill[kv-s3]'.", param=PARAM
        ) from error
    return obstore.store
