"""What a machine holds to prove that it belongs to a cluster, in a folder that only its user reads."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import ExtensionOID

from p2pshard.credentials import Credentials, Pems
from p2pshard.errors import Conflict, Unauthenticated
from p2pshard.private_files import make_private, write_private

from .certificates import Subject, authority_hash, id_of, key_from_pem, subject_of

__all__ = ["Keyring"]

_FILE = "keyring.pem"
"""One file, so that a keyring is replaced as a whole: the key, its certificate, the authority's certificate."""
_BLOCK = re.compile(rb"-----BEGIN [A-Z ]+-----\n.+?\n-----END [A-Z ]+-----\n", re.DOTALL)


@dataclass(frozen=True)
class Keyring:
    """Checked when it is made: the certificate is the authority's, and of the key. Raises `ValueError` otherwise."""

    pems: Pems
    subject: Subject = field(init=False)
    expires: datetime.datetime = field(init=False)
    renew_at: datetime.datetime = field(init=False)
    """After two thirds of the certificate's life."""

    def __post_init__(self) -> None:
        certificate = x509.load_pem_x509_certificate(self.pems.certificate)
        try:
            certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(self.pems.authority))
        except (InvalidSignature, TypeError) as error:
            raise ValueError("the certificate is not signed by the authority") from error
        key = key_from_pem(self.pems.key).public_key()
        try:
            names = certificate.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value
        except x509.ExtensionNotFound as error:
            raise ValueError("the certificate names nobody") from error
        assert isinstance(names, x509.SubjectAlternativeName)
        subject = subject_of(names.get_values_for_type(x509.DNSName))
        if subject is None or subject.id != id_of(key) or certificate.public_key() != key:
            raise ValueError("the certificate is not of the key")
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        object.__setattr__(self, "subject", subject)
        object.__setattr__(self, "expires", ends)
        object.__setattr__(self, "renew_at", begins + (ends - begins) * 2 / 3)

    @property
    def authority_hash(self) -> bytes:
        """sha256 of the authority's certificate, 32 bytes."""
        return authority_hash(self.pems.authority)

    def credentials(self) -> Credentials:
        return Credentials(self.pems)

    def save(self, folder: Path) -> None:
        """Write it, mode 0600, in place of any other in that folder."""
        make_private(folder)
        write_private(folder / _FILE, self.pems.key + self.pems.certificate + self.pems.authority)

    @classmethod
    def load(cls, folder: Path) -> Keyring | None:
        """The keyring of a folder; None: there is none.

        Raises `Conflict` when it is damaged or cannot be read, `Unauthenticated` when its certificate has expired.
        """
        try:
            blocks = _BLOCK.findall((folder / _FILE).read_bytes())
            if len(blocks) != 3:
                raise ValueError(f"it has {len(blocks)} parts in place of 3")
            keyring = cls(Pems(key=blocks[0], certificate=blocks[1], authority=blocks[2]))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Conflict(
                f"the certificate in {folder} cannot be read: {error.strerror or error}"
            ) from error
        except ValueError as error:
            raise Conflict(
                f"the certificate in {folder} is damaged ({error}); move that folder away and join again"
            ) from error
        if keyring.expires < datetime.datetime.now(datetime.UTC):
            raise Unauthenticated(
                f"the certificate in {folder} expired on {keyring.expires:%Y-%m-%d}; get a token with "
                "`p2pshard token create` on another machine and type `p2pshard join TOKEN` here",
                expired=keyring.expires.isoformat(),
            )
        return keyring
