"""What may be asked of the KV store of a machine: its tiers, and how they are used.

`tokenmill serve`, `worker`, `generate`, `chat` and `kv serve` take these as flags, `LLM` as keyword arguments. How an
engine uses a store that runs is among the options of the engine (`options.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ...core.errors import ConfigError
from ...core.options import check, option, size
from ...core.tiers import DISK, HOST, PEER, REMOTE
from ...core.units import MiB, format_bytes, parse_bytes
from ..tiers.policies import REPLACEMENT, REPLACEMENTS

SMALL_HOST_BYTES = 256 * MiB
"""Of host memory, where another tier was asked for and this one was not: what passes through it."""

LEAST_HOST_BYTES = 16 * MiB


def read_disk(text: str) -> str:
    """'DIR:50GB', as it is. Raises ValueError."""
    try:
        split_disk(text)
    except ConfigError as error:
        raise ValueError(error.message.removeprefix("--kv-disk ")) from None
    return text


def split_disk(text: str) -> tuple[Path, int]:
    """The folder, and how many bytes it may take. Raises ConfigError."""
    folder, _, room = text.rpartition(":")
    if not folder or not room.strip()[:1].isdigit():
        raise ConfigError(f"--kv-disk must be FOLDER:SIZE, such as /var/kv:50GB, got {text!r}.", param="kv_disk")
    num_bytes = parse_bytes(room, "--kv-disk")
    if num_bytes < LEAST_HOST_BYTES:
        raise ConfigError(f"--kv-disk must be {format_bytes(LEAST_HOST_BYTES)} at least, got {room}.", param="kv_disk")
    return Path(folder).expanduser().absolute(), num_bytes


def read_quota(text: str) -> tuple[str, int]:
    """'5GB' for each owner, 'NAME=5GB' for one. Raises ValueError."""
    owner, _, room = text.rpartition("=")
    return owner, size(room)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Where KV is kept below the pools of engines (docs/operate/kv-tiers.md). Raises ConfigError."""

    kv_host: int | None = option(
        None,
        "keep KV that leaves the engines' pools in so much memory of the machine, one for all engines there, such as"
        f" 4GB (default: none; {format_bytes(SMALL_HOST_BYTES)} beside another tier)",
        read=size,
        metavar="SIZE",
    )
    kv_disk: str | None = option(
        None,
        "keep KV on disk, where it outlives the server: a folder, which is as secret as prompts are, and how much it"
        " may take, such as /var/kv:50GB (default: none)",
        read=read_disk,
        metavar="FOLDER:SIZE",
    )
    kv_remote: str | None = option(
        None,
        "keep KV in a store that machines share: redis://HOST:PORT, s3://BUCKET/PREFIX, file:///FOLDER; needs"
        " --kv-key-file (default: none)",
        metavar="URL",
    )
    kv_peers: str | None = option(
        None,
        "fetch KV from the KV stores of other machines, which give --kv-peer-address; needs --kv-key-file"
        " (default: none)",
        metavar="HOST:PORT,...",
    )
    kv_peer_address: str | None = option(
        None, "where KV stores of other machines fetch KV from this one (default: nowhere)", metavar="HOST:PORT"
    )
    kv_key_file: str | None = option(
        None,
        "the cluster's key: 32 bytes or more in a file that only its owner may read; what leaves the machine is sealed"
        " with it",
        metavar="FILE",
    )
    kv_disk_key: str | None = option(
        None, "seal what is on disk, too, with the key in this file (default: not sealed)", metavar="FILE"
    )
    kv_tier_policy: str | None = option(
        None,
        f"what leaves a tier first: {', '.join(REPLACEMENTS)} (default: {REPLACEMENT})",
        choices=REPLACEMENTS,
        metavar="NAME",
    )
    kv_disk_write_rate: int | None = option(
        None,
        "bytes a second that are written to disk at most, such as 200MB, so that it wears slowly (default: unbounded)",
        read=size,
        metavar="SIZE",
    )
    kv_quota: tuple[tuple[str, int], ...] = option(
        (),
        "most that a tenant may have in a tier, such as 5GB, or one of them, as NAME=5GB (repeatable; default: no"
        " bound)",
        several="each",
        read=read_quota,
        metavar="[NAME=]SIZE",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.kv_host is not None and self.kv_host < LEAST_HOST_BYTES:
            least, got = format_bytes(LEAST_HOST_BYTES), format_bytes(self.kv_host)
            raise ConfigError(f"--kv-host must be {least} at least, got {got}.", param="kv_host")
        if self.kv_disk is not None:
            split_disk(self.kv_disk)
        if self.kv_remote is not None and not urlsplit(self.kv_remote).scheme:
            raise ConfigError("--kv-remote must be a URL such as redis://HOST:6379.", param="kv_remote")
        if self.kv_peers is not None and not self.peers:
            raise ConfigError("--kv-peers was given no address.", param="kv_peers")
        if self.kv_disk is None:
            for name in ("kv_disk_key", "kv_disk_write_rate"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"--{name.replace('_', '-')} needs --kv-disk.", param=name)
        shared = [name for name in ("kv_remote", "kv_peers", "kv_peer_address") if getattr(self, name) is not None]
        if shared and self.kv_key_file is None:
            raise ConfigError(
                f"--{shared[0].replace('_', '-')} needs --kv-key-file: what leaves the machine is sealed. A key is made"
                " by: (umask 077; head -c 32 /dev/urandom | base64 > kv.key)",
                param="kv_key_file",
            )

    @property
    def tiers(self) -> tuple[str, ...]:
        """Those that there are, nearest first; none: there is no store."""
        below = ((DISK, self.kv_disk), (REMOTE, self.kv_remote), (PEER, self.kv_peers))
        found = tuple(name for name, given in below if given is not None)
        is_asked = found or self.kv_host is not None or self.kv_peer_address is not None
        return (HOST, *found) if is_asked else ()

    @property
    def host_bytes(self) -> int:
        return SMALL_HOST_BYTES if self.kv_host is None else self.kv_host

    def with_folder(self, folder: str) -> TierOptions:
        """What `--kv-save` means beside tiers: the folder is that of the disk tier, which takes as much as host memory.
        Raises ConfigError."""
        if not folder:
            raise ConfigError("--kv-save was given no folder.", param="kv_save")
        if self.kv_disk is not None:
            raise ConfigError(
                "--kv-save and --kv-disk both name the folder of the disk tier: give --kv-disk FOLDER:SIZE alone.",
                param="kv_save",
            )
        return replace(self, kv_disk=f"{folder}:{self.host_bytes}")

    @property
    def disk(self) -> tuple[Path, int] | None:
        """The folder, and the bytes it may take."""
        return None if self.kv_disk is None else split_disk(self.kv_disk)

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(peer.strip() for peer in (self.kv_peers or "").split(",") if peer.strip())

    @property
    def quotas(self) -> Mapping[str, int]:
        """Bytes by owner; "": of every other owner that has a name."""
        return dict(self.kv_quota)

    def describe(self) -> str:
        """'host 4.0 GiB, disk 46.6 GiB in /var/kv'."""
        said = [f"host {format_bytes(self.host_bytes)}"]
        if self.disk is not None:
            said.append(f"disk {format_bytes(self.disk[1])} in {self.disk[0]}")
        if self.kv_remote is not None:
            url = urlsplit(self.kv_remote)
            said.append(f"remote {url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}")
        if self.peers:
            said.append(f"peers {', '.join(self.peers)}")
        return ", ".join(said)
