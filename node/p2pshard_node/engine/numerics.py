"""Does a stage give the same whatever the chunks and the batch, and are its kernels another machine's?

`check_chunks` runs a stage's own modules over its own pool. `golden` runs a small fixed model, with the same
kernels and dtype on every machine, and hashes all that comes out: two stages whose fingerprints are equal
and invariant may be mixed and moved without a bit changing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from p2pshard.errors import UnsupportedModel

__all__ = ["GOLDEN_CONFIG", "Golden", "GoldenWeights", "check_chunks", "golden"]

#: ``run([(start, values), ...]) -> [values, ...]``: one step of sequences 0, 1, ... of the pool. Values are
#: float32 hidden states [n, D], or int32 token ids [n] for a stage with the embedding; results are hidden
#: states.
Run = Callable[[Sequence[tuple[int, np.ndarray]]], list[np.ndarray]]

#: Largest relative difference of a token's hidden state between chunked and whole: of all tokens in float32;
#: of the median token otherwise, where a rounding may send one token to another expert. Measured on real
#: models: 3e-6, 1e-2 in bfloat16, and 0.15 in int8 over 18 layers (each flipped rounding of an activation is
#: carried on); a lost state changes about half of a token's hidden state, in every dtype.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1, "int8": 3.5e-1, "int4": 3.5e-1}

_LENGTH, _SINGLE = 15, 6


def check_chunks(run: Run, values: np.ndarray, *, sequences: int, dtype: str, architecture: str) -> bool:
    """Whether chunks of 7 and of 1, and a second row beside, leave every bit as it is in one piece.

    `values`: up to 15 tokens for one sequence; `sequences`: how many of that length the pool holds. Raises
    `UnsupportedModel` when the difference is more than rounding: the stage mixes tokens in a way we do not
    keep.
    """
    count = min(_LENGTH, len(values))
    values = values[:count]
    (whole,) = run([(0, values)])
    equal = True
    chunked = np.concatenate([run([(i, values[i : i + 7])])[0] for i in range(0, count, 7)])
    equal &= _compare(whole, chunked, "chunks of 7 tokens", dtype, architecture)
    singles = np.concatenate([run([(i, values[i : i + 1])])[0] for i in range(min(_SINGLE, count))])
    equal &= _compare(whole[: len(singles)], singles, "chunks of 1 token", dtype, architecture)
    if sequences > 1 and count > 1:
        other = values[::-1][: max(1, count // 2)].copy()
        (alone,) = run([(0, other)])
        together = run([(0, values), (0, other)])
        equal &= _compare(whole, together[0], "two sequences in a step", dtype, architecture)
        equal &= _compare(alone, together[1], "two sequences in a step", dtype, architecture)
    return bool(equal)


def _compare(whole: np.ndarray, parts: np.ndarray, how: str, dtype: str, architecture: str) -> bool:
    if np.array_equal(whole, parts):
        return True
    distance = np.linalg.norm(whole - parts, axis=1) / np.maximum(np.linalg.norm(whole, axis=1), 1e-9)
    worst = float(distance.max() if dtype == "float32" else np.median(distance))
    if not worst <= TOLERANCE[dtype]:
        raise UnsupportedModel(
            f"{architecture} is not supported: {how} differ from the whole by {worst:.1e} "
            f"(allowed: {TOLERANCE[dtype]:.0e}), "
            "so its layers keep a state between tokens that this engine does not",
            architecture=architecture,
        )
    return False


# -- the golden model -----------------------------------------------------------------------------
GOLDEN_CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_TOKENS = 64


class GoldenWeights:
    """The golden model's weights, made of integers: the same on every machine."""

    def __init__(self) -> None:
        d, f, kv, v = 256, 512, 128, 64
        layer = "model.layers.0."
        self._shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (v, d),
            layer + "self_attn.q_proj.weight": (d, d),
            layer + "self_attn.k_proj.weight": (kv, d),
            layer + "self_attn.v_proj.weight": (kv, d),
            layer + "self_attn.o_proj.weight": (d, d),
            layer + "mlp.gate_proj.weight": (f, d),
            layer + "mlp.up_proj.weight": (f, d),
            layer + "mlp.down_proj.weight": (d, f),
            layer + "input_layernorm.weight": (d,),
            layer + "post_attention_layernorm.weight": (d,),
            "model.norm.weight": (d,),
            "lm_head.weight": (v, d),
        }

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def load(self, name: str, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> torch.Tensor:
        shape = self._shapes[name]
        salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        index = np.arange(int(np.prod(shape)), dtype=np.uint64) * np.uint64(2654435761) + np.uint64(salt)
        index ^= index >> np.uint64(15)
        value = ((index * np.uint64(2246822519)) >> np.uint64(8) & np.uint64(0xFFFF)).astype(
            np.float32
        ) / 32768 - 1
        value = value.reshape(shape) / 8 if len(shape) > 1 else 1 + value.reshape(shape) / 4
        tensor = torch.from_numpy(value).to(dtype)
        return tensor if rows is None else tensor[rows[0] : rows[1]]


@dataclass(frozen=True)
class Golden:
    invariant: bool
    """Batches of 1, 2, 3, 8 and chunks of 1, 7, 64 give equal bits."""
    fingerprint: str
    """Hex sha256 of all of them."""


def golden(run: Run, dtype: str) -> Golden:
    """Judge the kernels by the golden model, whose step is `run` (with at least eight sequences of 64
    tokens)."""
    ids = (np.arange(_TOKENS, dtype=np.int32) * 37 + 11) % GOLDEN_CONFIG["vocab_size"]  # type: ignore[operator]
    results = [
        np.concatenate([run([(i, ids[i : i + n])])[0] for i in range(0, _TOKENS, n)]) for n in (64, 7, 1)
    ]
    # after the last run, sequence 0 holds every position; the others are given theirs, then all take one
    # more step
    run([(0, ids[:-1])] * 8)
    last = [run([(_TOKENS - 1, ids[-1:])] * batch) for batch in (1, 2, 3, 8)]
    whole = results[0]
    equal = all(np.array_equal(whole, r) for r in results[1:])
    equal = equal and all(np.array_equal(whole[-1:], row) for rows in last for row in rows)
    digest = hashlib.sha256(dtype.encode())
    for array in (*results, *(row for rows in last for row in rows)):
        digest.update(np.ascontiguousarray(array).tobytes())
    return Golden(equal, digest.hexdigest())
