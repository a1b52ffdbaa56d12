"""Ed25519 keys (RFC 8032) in files, and what is signed with them.

A private key is a PEM file that its owner alone may read. The package for it, cryptography, comes with the extra
`audit`: it is imported where a key is first needed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_NEEDS = "Signing needs the package cryptography: pip install 'tokenmill[audit]'."


class Signer:
    """Signs with one private key. `key_id` names the key in what is signed."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = Verifier(key.public_key())
        self.key_id = self.public.key_id

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


class Verifier:
    """One public key. `raw`: its 32 bytes."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key
        self.raw: bytes = key.public_bytes_raw()
        self.key_id = hashlib.sha256(self.raw).hexdigest()[:16]

    def holds(self, signature: bytes, message: bytes) -> bool:
        """Whether the owner of the key has signed `message`."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


def make_key(path: Path) -> Path:
    """Write a new private key to `path`, mode 0600, and its public key beside it: the path of that. Raises ConfigError,
    also where either file is there already."""
    ed25519, serialization = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    beside = path.with_name(path.name + ".pub")
    _write_new(path, private, 0o600)
    _write_new(beside, public, 0o644)
    return beside


def load_signer(path: str, flag: str) -> Signer:
    """Raises ConfigError for a file that is no such key, or that others than its owner may read or write."""
    ed25519, serialization = _cryptography()
    data = _read(path, flag)
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        raise ConfigError(f"{flag} {path} may be used by others than its owner (mode {mode:o}): chmod 600 {path}.")
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{flag} {path} is no private key in PEM without a password.") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ConfigError(f"{flag} {path} is no Ed25519 key; make one with: tokenmill audit keygen FILE")
    return Signer(key)


def load_verifier(path: str, flag: str) -> Verifier:
    """Raises ConfigError for a file that is no public key."""
    ed25519, serialization = _cryptography()
    try:
        key = serialization.load_pem_public_key(_read(path, flag))
    except ValueError as error:
        raise ConfigError(f"{flag} {path} is no public key in PEM.") from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ConfigError(f"{flag} {path} is no Ed25519 key.")
    return Verifier(key)


def verifier_of(raw: bytes) -> Verifier:
    """Of a public key's 32 bytes. Raises ValueError."""
    ed25519, _ = _cryptography()
    return Verifier(ed25519.Ed25519PublicKey.from_public_bytes(raw))


def _cryptography():  # type: ignore[no-untyped-def]
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError(_NEEDS) from error
    return ed25519, serialization


def _read(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}.") from error


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
