"""A cluster's certificates, the keyring of a machine, and tokens."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pshard.credentials import Credentials, Pems
from p2pshard.errors import Conflict, InvalidRequest, Unauthenticated
from p2pshard.security import certificates as c
from p2pshard.security.keyring import Keyring
from p2pshard.security.token import Token, prove
from p2pshard.transport.channels import bind, make_channel, make_server

AUTHORITY = c.make_authority()


def pems(
    authority: tuple[bytes, bytes] = AUTHORITY, role: c.Role = c.Role.NODE, days: float = c.DAYS
) -> Pems:
    key = c.new_key()
    certificate = c.sign(*authority, c.request(key), role, days)
    return Pems(authority[1], certificate, c.key_to_pem(key))


def test_a_certificate_names_the_id_that_comes_from_its_key() -> None:
    for role in c.Role:
        keyring = Keyring(pems(role=role))
        assert keyring.subject == c.Subject(role, c.id_of(c.key_from_pem(keyring.pems.key).public_key()))
        assert keyring.authority_hash == c.authority_hash(AUTHORITY[1])


def test_a_request_that_is_not_signed_by_its_own_key_gets_nothing() -> None:
    csr = bytearray(c.request(c.new_key()))
    csr[-1] ^= 1
    for bad in (bytes(csr), b"", b"x" * 200, c.request(c.new_key())[:-10]):
        with pytest.raises(InvalidRequest, match="certificate request"):
            c.sign(*AUTHORITY, bad, c.Role.NODE)


@pytest.mark.parametrize(
    "names", [[], ["node.p2pshard"], ["x.node.p2pshard"], ["0" * 16 + ".node.p2pshard.evil"], ["0" * 16]]
)
def test_other_names_are_nobodys(names: list[str]) -> None:
    assert c.subject_of(names) is None


def test_a_keyring_comes_back_from_its_folder_which_only_its_user_reads(tmp_path: Path) -> None:
    folder = tmp_path / "security"
    assert Keyring.load(folder) is None
    kept = Keyring(pems())
    kept.save(folder)
    assert Keyring.load(folder) == kept
    kept = Keyring(pems())  # another takes its place
    kept.save(folder)
    assert Keyring.load(folder) == kept
    if os.name == "posix":
        assert [stat.S_IMODE(f.stat().st_mode) for f in (folder, *folder.iterdir())] == [0o700, 0o600]
    assert "PRIVATE" not in repr(kept)


def test_a_keyring_that_does_not_hold_together_is_told_from_one_that_expired(tmp_path: Path) -> None:
    one, other = pems(), pems(c.make_authority())
    for bad in (
        Pems(one.authority, one.certificate, other.key),
        Pems(other.authority, one.certificate, one.key),
        Pems(one.authority, one.authority, one.key),
    ):
        with pytest.raises(ValueError):
            Keyring(bad)
    Keyring(one).save(tmp_path)
    file = tmp_path / "keyring.pem"
    whole = file.read_bytes()
    for damaged in (b"", whole[:-40], whole[:200] + b"!!" + whole[202:], whole + whole):
        file.write_bytes(damaged)
        with pytest.raises(Conflict, match="damaged"):
            Keyring.load(tmp_path)
    Keyring(pems(days=-1)).save(tmp_path)
    with pytest.raises(Unauthenticated, match=r"expired on .*join TOKEN"):
        Keyring.load(tmp_path)


def test_a_token_is_read_as_it_was_written_and_proves_one_request() -> None:
    token = Token.new(c.authority_hash(AUTHORITY[1]), "0123456789abcdef")
    assert Token.parse(f" {token.text}\n") == token
    assert token.secret.hex() not in repr(token)
    csr, other = c.request(c.new_key()), c.request(c.new_key())
    assert prove(token.key, csr) == token.proof(csr) != token.proof(other)
    assert Token.new(token.authority_hash, token.issuer).proof(csr) != token.proof(csr)


@given(st.text(max_size=120))
def test_any_other_text_is_no_token_and_is_not_repeated(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Token.parse("p2ps1." + text)
    assert len(text) < 12 or text not in caught.value.message


async def _who(credentials: Credentials | None, port: int, node: str = "") -> str:
    channel = make_channel(f"127.0.0.1:{port}", credentials, node=node, own_connection=True)
    try:
        return (await channel.unary_unary("/test/Who")(b"", timeout=5)).decode()
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        await channel.close()


async def test_only_certificates_of_the_authority_come_through_and_renewed_ones_serve_at_once() -> None:
    async def who(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        said = context.auth_context()
        names = [n.decode() for n in said["x509_subject_alternative_name"]]
        assert said["ssl_tls_version"] == [b"TLSv1.3"]
        return c.subject_of(names).id.encode()  # type: ignore[union-attr]

    keyring = Keyring(pems())
    ours = keyring.credentials()
    server = make_server()
    handlers = {"Who": grpc.unary_unary_rpc_method_handler(who)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = bind(server, ours, "127.0.0.1")
    await server.start()
    try:
        caller = Keyring(pems())
        mine = caller.credentials()
        assert await _who(mine, port) == caller.subject.id
        assert await _who(mine, port, keyring.subject.id) == caller.subject.id
        assert await _who(mine, port, caller.subject.id) == "UNAVAILABLE", "another node answers there"
        stranger, expired = Credentials(pems(c.make_authority())), Credentials(pems(days=-1))
        assert [await _who(w, port) for w in (None, stranger, expired)] == ["UNAVAILABLE"] * 3
        assert await _who(Credentials(pems(role=c.Role.CLIENT)), port) != "UNAVAILABLE"
        renewed = Keyring(pems())
        ours.renew(renewed.pems)
        assert ours.generation == 1
        assert await _who(mine, port, renewed.subject.id) == caller.subject.id
    finally:
        await server.stop(None)
