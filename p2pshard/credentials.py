"""What a channel or a server needs to prove who it is; ``None`` stands for plaintext.

Every place that makes a connection passes one of these through, so that turning TLS on changes
no caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

__all__ = ["Credentials"]


@dataclass(frozen=True)
class Credentials:
    """PEM blocks of mutual TLS: our own key and certificate, and the authority both ends trust."""

    authority: bytes
    certificate: bytes
    key: bytes
    server_name: str = ""
    """Name expected in the other end's certificate when it is not the host dialled; empty: the host."""

    def __repr__(self) -> str:
        return f"Credentials(server_name={self.server_name!r})"  # a key never reaches a log

    def for_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def for_server(self) -> grpc.ServerCredentials:
        """Clients without a certificate of the authority are refused."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], self.authority, require_client_auth=True
        )
