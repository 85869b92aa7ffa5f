"""What one epoch leaves another: the pool's bytes, and requests for them that cannot be right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from p2pshard_node.engine.kv import KvPool, KvShape
from p2pshard_node.worker import carry
from p2pshard_node.worker.carry import Before, Left
from p2pshard_node.worker.table import BlockTable

from p2pshard.errors import ProtocolError
from p2pshard.planning.plan import Epoch
from p2pshard.transport.channels import EOF
from tests.worker_lab import make_plan

SHAPE = KvShape(heads=2, key_width=8, value_width=4)


def pool(dtype: torch.dtype, blocks: int = 6) -> KvPool:
    made = KvPool({3: SHAPE, 4: SHAPE}, blocks=blocks, block_size=4, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for tensor in (*made.keys.values(), *made.values.values()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator).to(dtype))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_travel_bit_for_bit_and_nothing_else_changes(dtype: torch.dtype) -> None:
    source, target = pool(dtype), pool(dtype)
    for tensor in (*target.keys.values(), *target.values.values()):
        tensor.zero_()
    data = source.read(3, [5, 1])
    assert len(data) == 2 * source.block_bytes(3)
    target.write(3, [5, 1], data)
    target.take(source, [4], [0])
    for layer, moved in ((3, {1, 5}), (4, {0})):
        for mine, theirs in (
            (target.keys[layer], source.keys[layer]),
            (target.values[layer], source.values[layer]),
        ):
            for block in range(6):
                expected = theirs[block * 4 : block * 4 + 4] if block in moved else torch.zeros(())
                assert (mine[block * 4 : block * 4 + 4] == expected).all(), (layer, block)
    with pytest.raises(ValueError, match="bytes"):
        target.write(3, [5], data)


class Context:
    def __init__(self, *messages: Any) -> None:
        self.messages, self.written = list(messages), list[Any]()

    async def read(self) -> Any:
        return self.messages.pop(0) if self.messages else EOF

    async def write(self, data: bytes) -> None:
        self.written.append(msgpack.unpackb(data))


def left() -> Left:
    plan = make_plan("f" * 64, 6, 2, blocks=8)
    table = BlockTable(8, 16)
    table.fill([2, 3], np.arange(32, dtype=np.int32).reshape(2, 16))
    model: Any = SimpleNamespace(
        kv_block_bytes=lambda layer: 300_000,
        read_kv=lambda layer, blocks: bytes([layer]) * (300_000 * len(blocks)),
    )
    return Left(plan, 0, model, table, ((b"k", 2), (b"l", 3)))


def request(**changes: Any) -> bytes:
    return msgpack.packb({"epoch": [1, "n0"], "layers": [0, 2], "blocks": [2, 3], **changes})  # type: ignore[no-any-return]


async def serve(data: Any) -> list[Any]:
    context = Context(data)

    async def found(epoch: Epoch) -> Left:
        assert epoch == Epoch(1, "n0")
        return left()

    await carry.serve(context, found)
    return context.written


async def test_what_is_asked_for_is_given_in_pieces() -> None:
    assert await serve(request(layers=[], blocks=[])) == [{"content": [[b"k", 2], [b"l", 3]]}]
    ids, *pieces = await serve(request())
    assert np.frombuffer(ids["ids"], np.int32).tolist() == list(range(32))
    assert [(p["layer"], p["first"], len(p["data"])) for p in pieces] == [(0, 0, 600_000), (2, 0, 600_000)]


@pytest.mark.parametrize(
    "data",
    [
        EOF,
        b"",
        b"\xc1",
        b"x" * (2 << 20),
        msgpack.packb([1]),
        msgpack.packb({}),
        request(epoch=[1]),
        request(epoch=["1", "n0"]),
        request(epoch=[1, 7]),
        request(layers=[3]),
        request(layers=[-1]),
        request(layers=[0, 0]),
        request(layers="ab"),
        request(blocks=[8]),
        request(blocks=[-1]),
        request(blocks=[True]),
        request(blocks=[0]),  # not complete
        request(blocks=7),
    ],
)
async def test_requests_that_cannot_be_right_are_refused(data: Any) -> None:
    with pytest.raises(ProtocolError):
        await serve(data)


def test_an_epoch_is_followed_only_by_one_whose_blocks_are_the_same() -> None:
    plan = make_plan("f" * 64, 6, 2, blocks=8)
    message = {"plan": plan.to_json(), "targets": [["10.0.0.1", 1], ["10.0.0.2", 2]]}
    before = Before.from_message(message)
    assert before is not None and before.targets == ("10.0.0.1:1", "10.0.0.2:2")
    assert before.fits(make_plan("f" * 64, 6, 3, blocks=8))
    assert not before.fits(make_plan("f" * 64, 6, 2, blocks=9))
    assert not before.fits(make_plan("e" * 64, 6, 2, blocks=8))
    assert not before.fits(make_plan("f" * 64, 6, 2, blocks=8, dtype="int8"))
    assert Before.from_message(None) is None
    with pytest.raises(ProtocolError, match="addresses"):
        Before.from_message({**message, "targets": []})
