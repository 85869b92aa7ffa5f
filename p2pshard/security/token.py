"""The text that lets a machine join a cluster: ``p2ps1.<hash of the cluster's authority>.<secret>``.

The hash tells whom to trust before anything is sent; the secret itself is never sent: a request is signed with it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from p2pshard.errors import InvalidRequest

__all__ = ["Token", "hash_text", "prove"]

_PREFIX = "p2ps1"
_ISSUER, _ID, _SECRET = 8, 6, 18


def hash_text(authority_hash: bytes) -> str:
    """An authority's hash as tokens and announcements have it: base64url without padding, 43 characters."""
    return base64.urlsafe_b64encode(authority_hash).rstrip(b"=").decode()


def prove(key: bytes, csr: bytes) -> bytes:
    """What shows that a request was made by somebody who has the token; it is good for that request alone."""
    return hmac.digest(key, b"p2pshard join\0" + csr, "sha256")


@dataclass(frozen=True)
class Token:
    """One token, as it is given to people."""

    authority_hash: bytes
    """sha256 of the authority's certificate, 32 bytes."""
    issuer: str
    """Id of the node that made it, where alone it is redeemed."""
    id: str
    """12 hex digits: what it is called in lists, and where it is looked up."""
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls, authority_hash: bytes, issuer: str) -> Token:
        return cls(authority_hash, issuer, secrets.token_hex(_ID), secrets.token_bytes(_SECRET))

    @classmethod
    def parse(cls, text: str) -> Token:
        """Raises `InvalidRequest`, without repeating the text."""
        parts = "".join(text.split()).split(".")
        if len(parts) == 3 and parts[0] == _PREFIX:
            try:
                digest, rest = (base64.b64decode(p + "=" * (-len(p) % 4), b"-_", True) for p in parts[1:])
            except (binascii.Error, ValueError):
                digest = rest = b""
            if len(digest) == 32 and len(rest) == _ISSUER + _ID + _SECRET:
                issuer, name = rest[:_ISSUER].hex(), rest[_ISSUER : _ISSUER + _ID].hex()
                return cls(digest, issuer, name, rest[_ISSUER + _ID :])
        raise InvalidRequest(
            f"that is not a token: one is {_PREFIX}., 43 characters, a dot and 43 more, as `p2pshard token create` prints it",
            field="token",
        )

    @property
    def text(self) -> str:
        rest = bytes.fromhex(self.issuer) + bytes.fromhex(self.id) + self.secret
        return f"{_PREFIX}.{hash_text(self.authority_hash)}.{hash_text(rest)}"

    @property
    def key(self) -> bytes:
        """What is kept of the secret where it was made, and what `prove` takes."""
        return hashlib.sha256(b"p2pshard token\0" + self.secret).digest()

    def proof(self, csr: bytes) -> bytes:
        return prove(self.key, csr)
