"""What a channel or a server proves itself with; ``None`` in its place stands for plaintext.

Every place that makes a connection passes one of these through. They are alive: certificates are renewed while a
process runs, and connections made afterwards use the new one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

__all__ = ["SERVER_NAME", "Credentials", "Pems", "server_name"]

SERVER_NAME = "node.p2pshard"
"""In the certificate of every node: what is expected where it is not known yet which node answers."""


def server_name(node: str) -> str:
    """What the certificate of one node says, and no other's."""
    return f"{node}.{SERVER_NAME}" if node else SERVER_NAME


@dataclass(frozen=True)
class Pems:
    """PEM blocks of mutual TLS: the authority that both ends trust, our certificate and its key."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)  # a key never reaches a log


class Credentials:
    """Those of one process, replaced when its certificate is renewed."""

    def __init__(self, pems: Pems) -> None:
        self.pems = pems
        self.generation = 0
        """Grows with each renewal: a connection of an earlier one is made again before its certificate ends."""

    def renew(self, pems: Pems) -> None:
        self.pems = pems
        self.generation += 1

    def for_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.pems.authority, self.pems.key, self.pems.certificate)

    def for_server(self) -> grpc.ServerCredentials:
        """Callers without a certificate of the authority are refused in the TLS handshake."""
        return grpc.dynamic_ssl_server_credentials(self._configuration(), self._configuration, True)

    # Called by gRPC, on a thread of its own, at each handshake.
    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pems = self.pems
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.authority)
