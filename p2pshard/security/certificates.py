"""X.509 certificates of a cluster: its authority, its nodes and its clients (RFC 5280; ECDSA on P-256).

A certificate says one thing: the holder of this key is this node, or this client, of this cluster. The id is the hash
of the key, so nobody can be given a certificate for an id that is another's.
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from p2pshard.credentials import SERVER_NAME, server_name
from p2pshard.errors import InvalidRequest

__all__ = [
    "AUTHORITY_DAYS",
    "DAYS",
    "Role",
    "Subject",
    "authority_hash",
    "id_of",
    "key_from_pem",
    "key_to_pem",
    "make_authority",
    "new_key",
    "request",
    "sign",
    "subject_of",
]

AUTHORITY_DAYS = 20 * 365
DAYS = 90
"""Of a certificate; it is renewed after two thirds of that."""
BACKDATED = datetime.timedelta(hours=48)
"""Boards without a clock wake up in the past."""
_CLIENT_NAME = "client.p2pshard"
_ID = re.compile(r"[0-9a-f]{16}")

Key = ec.EllipticCurvePrivateKey


class Role(enum.StrEnum):
    """What the holder of a certificate may be."""

    NODE = "node"
    CLIENT = "client"


@dataclass(frozen=True)
class Subject:
    """Whom a certificate is of."""

    role: Role
    id: str
    """16 hex digits, from its key."""


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def key_from_pem(pem: bytes) -> Key:
    """Raises `ValueError` for anything but a private key on P-256."""
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("not a private key on P-256")
    return key


def id_of(key: ec.EllipticCurvePublicKey) -> str:
    """The id that the holder of a key has: the first 8 bytes of its hash, in hex."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).digest()[:8].hex()


def authority_hash(authority: bytes) -> bytes:
    """sha256 of the authority's certificate (32 bytes): what a token names a cluster by. ``authority``: its PEM."""
    return hashlib.sha256(
        x509.load_pem_x509_certificate(authority).public_bytes(serialization.Encoding.DER)
    ).digest()


def make_authority() -> tuple[bytes, bytes]:
    """PEMs of the key and the certificate of a new authority."""
    key = new_key()
    name = _name(f"p2pshard {id_of(key.public_key())}")
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key_to_pem(key), certificate.public_bytes(serialization.Encoding.PEM)


def request(key: Key) -> bytes:
    """A certificate signing request (PKCS #10, DER): it proves that the sender has the key."""
    csr = x509.CertificateSigningRequestBuilder().subject_name(_name(id_of(key.public_key())))
    return csr.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def _requested_key(csr: bytes) -> ec.EllipticCurvePublicKey:
    try:
        parsed = x509.load_der_x509_csr(csr)
        key = parsed.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise InvalidRequest("the certificate request is not for a key on P-256")
        if not parsed.is_signature_valid:
            raise InvalidRequest("the certificate request is not signed by its own key")
    except (ValueError, TypeError, InvalidSignature) as error:
        raise InvalidRequest(f"that is not a certificate request: {error}") from error
    return key


def sign(authority_key: bytes, authority: bytes, csr: bytes, role: Role, days: float = DAYS) -> bytes:
    """The certificate (PEM) for a request. Of the request only its key is used. Raises `InvalidRequest`."""
    key = _requested_key(csr)
    issuer = x509.load_pem_x509_certificate(authority).subject
    subject = id_of(key)
    if role is Role.NODE:
        names = [SERVER_NAME, server_name(subject)]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    else:
        names, uses = [f"{subject}.{_CLIENT_NAME}"], [ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(_name(subject), issuer, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), critical=False)
        .sign(key_from_pem(authority_key), hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def subject_of(names: Iterable[str]) -> Subject | None:
    """Whom a certificate is of, by its alternative names, once TLS has checked it; None: of nobody that we know."""
    for name in names:
        first, _, rest = name.partition(".")
        if _ID.fullmatch(first):
            if rest == SERVER_NAME:
                return Subject(Role.NODE, first)
            if rest == _CLIENT_NAME:
                return Subject(Role.CLIENT, first)
    return None


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
