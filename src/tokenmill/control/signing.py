"""Ed25519 keys (RFC 8032) in files, and what is signed with them: heads of the audit log, and answers.

A signed answer has a JSON Web Signature (RFC 7515, EdDSA of RFC 8037) of what was asked, what was answered and by what.
The payload is canonical JSON: sorted names, no spaces. It has the SHA-256 of the request's body and of the response's,
the path, the model and its fingerprint where an engine answered, and the time. A whole answer carries the signature in
the header `x-tokenmill-signature`. A stream of events ends with it in a comment, which clients skip; it is of all bytes
up to there. Answers of other forms (Ollama's lines of JSON, files) are not signed: they have no such place.

A private key is a PEM file that its owner alone may read. The package for it, cryptography, comes with the extra
`audit`: it is imported where a key is first needed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

COMMENT = b": tokenmill-signature "
_NEEDS = "Signing needs the package cryptography: pip install 'tokenmill[audit]'."


class BadSignature(Exception):
    """Why an answer is not one that was signed."""


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


def sign(payload: dict[str, Any], signer: Signer) -> str:
    head = {"alg": "EdDSA", "kid": signer.key_id}
    signed = f"{_encode(_canonical(head))}.{_encode(_canonical(payload))}"
    return f"{signed}.{_encode(signer.sign(signed.encode()))}"


def check(token: str, key: Verifier, request: bytes, response: bytes) -> dict[str, Any]:
    """The payload of a signature that fits both bodies. Raises BadSignature saying what does not fit."""
    try:
        head, payload, signature = (_decode(part) for part in token.split("."))
        told, facts = json.loads(head), json.loads(payload)
        alg, kid = told["alg"], told["kid"]
    except (ValueError, TypeError, KeyError):
        raise BadSignature("The signature has not the form of one.") from None
    if alg != "EdDSA" or kid != key.key_id:
        raise BadSignature(f"It was made with another key ({str(kid)[:40]!r}, not {key.key_id!r}).")
    if not key.holds(signature, token.rpartition(".")[0].encode()):
        raise BadSignature("The signature is not valid.")
    for name, body in (("request", request), ("response", response)):
        if facts.get(f"{name}_sha256") != hashlib.sha256(body).hexdigest():
            raise BadSignature(f"It is of another {name}.")
    found: dict[str, Any] = facts
    return found


def take_comment(response: bytes) -> tuple[bytes, str]:
    """(what was signed, the signature) of a stream that ends with one. Raises BadSignature."""
    signed, found, rest = response.rpartition(COMMENT)
    if not found or (signed and not signed.endswith(b"\n")):
        raise BadSignature("The stream does not end with a signature.")
    return signed, rest.strip().decode("ascii", "replace")


def jwk(signer: Signer) -> dict[str, str]:
    """Its public key as a JSON Web Key (RFC 7517, RFC 8037)."""
    key = {"kty": "OKP", "crv": "Ed25519", "use": "sig", "alg": "EdDSA", "kid": signer.key_id}
    return key | {"x": _encode(signer.public.raw)}


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
