"""From logits to tokens. The same logits, settings and history give the same token, wherever and whenever.

The order of the steps: penalties, temperature, top-k, top-p (over what top-k left), min-p (against the most
likely token), then a draw by inverse CDF over what is left, in id order. Ties always go to the lowest id.
Probabilities are float64. The random number is a hash of (seed, choice, output index): it depends on nothing
that happened before, so a request goes on with the same tokens after any failover. Top-p: arXiv:1904.09751;
min-p: arXiv:2407.01082.

`sample` defines the choice for one row; `sample_rows` makes it for all rows of a step, bit for bit the same.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from p2pshard.errors import Internal, InvalidRequest, P2PShardError
from p2pshard.sampling import SamplingParams

__all__ = ["Draw", "Sampled", "sample", "sample_rows", "uniform"]

_STRONG = 2.0**-4
"""Weight, relative to the best token's, of those that are looked at first for top-p."""


@dataclass(frozen=True)
class Sampled:
    """One chosen token."""

    id: int
    logprob: float
    """Natural log of its probability in the unmodified distribution; 0 when not asked for."""
    top: tuple[tuple[int, float], ...]
    """``(id, logprob)`` of the most likely tokens of that distribution, best first."""


@dataclass(frozen=True)
class Draw:
    """What one row of logits is to be sampled with; see `sample`."""

    params: SamplingParams
    prompt_ids: Sequence[int] | np.ndarray
    """Both ids are looked at only where `SamplingParams.penalised`."""
    output_ids: Sequence[int] | np.ndarray
    index: int


def uniform(seed: int, index: int, choice: int = 0) -> float:
    """The random number of one token, in [0, 1): the top 53 bits of a blake2b hash of 64.

    Hashed are seed, choice and index as little-endian uint64, personalised ``p2pshard-sample``.

    Args:
        seed: the request's.
        index: of the token in the output.
        choice: which of several answers to one request.
    """
    data = struct.pack("<QQQ", seed, choice, index)
    digest = hashlib.blake2b(data, digest_size=8, person=b"p2pshard-sample").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(
    logits_V: np.ndarray,
    params: SamplingParams,
    prompt_ids: Sequence[int] | np.ndarray,
    output_ids: Sequence[int] | np.ndarray,
    index: int,
) -> Sampled:
    """Choose the token with output index ``index``.

    Args:
        logits_V: float [V], not changed. -inf rules a token out.
        params: the request's settings.
        prompt_ids: for the repetition penalty.
        output_ids: the ``index`` tokens already given.
        index: keys the random number.

    Raises:
        Internal: NaN or +inf among the logits, or nothing but -inf.
        InvalidRequest: an id of the history outside the vocabulary.
    """
    if logits_V.ndim != 1 or not logits_V.size:
        raise Internal(f"logits of shape {logits_V.shape}; one row of the vocabulary was expected")
    return _sample(logits_V, int(np.argmax(logits_V)), Draw(params, prompt_ids, output_ids, index))


def sample_rows(logits_RV: np.ndarray, draws: Sequence[Draw]) -> list[Sampled | P2PShardError]:
    """Choose a token for each row, as `sample` does; a row that cannot be sampled gives its error.

    The best token of every row is found in one call, and that is all there is to do for a greedy row.
    (Exponentials and sums of all rows at once are slower than row by row: they leave the cache.)

    Args:
        logits_RV: float [R, V], not changed.
        draws: one for each row.

    Raises:
        Internal: logits of another shape.
    """
    if logits_RV.ndim != 2 or len(logits_RV) != len(draws) or not logits_RV.shape[1]:
        raise Internal(f"logits of shape {logits_RV.shape} came for {len(draws)} rows to sample")
    found: list[Sampled | P2PShardError] = []
    for logits_V, best, draw in zip(logits_RV, np.argmax(logits_RV, axis=1).tolist(), draws, strict=True):
        try:
            found.append(_sample(logits_V, best, draw))
        except P2PShardError as error:
            found.append(error)
    return found


def _sample(logits_V: np.ndarray, best: int, draw: Draw) -> Sampled:
    # argmax takes NaN for the largest value: it finds the best token and any NaN
    peak, params = float(logits_V[best]), draw.params
    if not math.isfinite(peak):
        what = "NaN" if math.isnan(peak) else "no finite logit" if peak < 0 else "an infinite logit"
        raise Internal(
            f"the model produced {what} at output index {draw.index}; its weights or a kernel are at fault"
        )
    adjusted_V = _penalised(logits_V, params, draw.prompt_ids, draw.output_ids)
    if params.temperature:
        token = _draw(adjusted_V, params, uniform(params.seed, draw.index))
    else:
        token = best if adjusted_V is logits_V else int(np.argmax(adjusted_V))
    if params.logprobs < 0:
        return Sampled(token, 0.0, ())
    exact_V = logits_V.astype(np.float64)
    shift = peak + float(np.log(np.exp(exact_V - peak).sum()))
    top = _best(exact_V, params.logprobs) if params.logprobs else ()
    return Sampled(
        token, float(exact_V[token] - shift), tuple((int(i), float(exact_V[i] - shift)) for i in top)
    )


def _penalised(
    logits_V: np.ndarray,
    params: SamplingParams,
    prompt_ids: Sequence[int] | np.ndarray,
    output_ids: Sequence[int] | np.ndarray,
) -> np.ndarray:
    """Logits after penalties; the argument itself when there are none."""
    if not params.penalised:
        return logits_V
    repetition = params.repetition_penalty != 1
    counted = params.presence_penalty != 0 or params.frequency_penalty != 0
    size = len(logits_V)
    adjusted_V = logits_V.astype(np.float64)
    output, counts = np.unique(_ids(output_ids, size), return_counts=True)
    if repetition:
        seen = np.union1d(output, _ids(prompt_ids, size))
        values = adjusted_V[seen]
        adjusted_V[seen] = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if counted:
        adjusted_V[output] -= params.presence_penalty + params.frequency_penalty * counts
    return adjusted_V


def _ids(ids: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    array = np.asarray(ids, dtype=np.int64)
    if array.size and not (int(array.min()) >= 0 and int(array.max()) < size):
        raise InvalidRequest(
            f"a token id from {array.min()} to {array.max()} is outside the vocabulary of {size}"
        )
    return array


def _draw(logits_V: np.ndarray, params: SamplingParams, number: float) -> int:
    """One token of the distribution that temperature, top-k, top-p and min-p leave."""
    weights_V = logits_V.astype(np.float64)
    weights_V -= weights_V.max()
    weights_V /= params.temperature
    np.exp(
        weights_V, out=weights_V
    )  # relative to the best token's 1; a tiny temperature gives zeros, never NaN
    kept, weights = None, weights_V  # None: all ids
    if params.top_k and params.top_k < len(weights_V):
        kept = np.sort(_best(weights_V, params.top_k))
        weights = weights_V[kept]
    if params.top_p < 1:
        likely = np.sort(_nucleus(weights, params.top_p))
        kept, weights = likely if kept is None else kept[likely], weights[likely]
    if params.min_p > 0:
        strong = np.flatnonzero(weights >= params.min_p)  # the best token has weight 1
        kept, weights = strong if kept is None else kept[strong], weights[strong]
    cumulative = np.cumsum(weights)
    place = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    if place >= len(weights):  # rounding at the very end: the last token that has any probability
        place = int(np.flatnonzero(weights)[-1])
    return place if kept is None else int(kept[place])


def _best(values_V: np.ndarray, count: int) -> np.ndarray:
    """Ids of the ``count`` largest, largest first, ties by lowest id: as a stable full sort gives them."""
    size = len(values_V)
    count = min(count, size)
    if count < size:
        bound = np.partition(values_V, size - count)[size - count]
        above = np.flatnonzero(values_V > bound)
        equal = np.flatnonzero(values_V == bound)[: count - len(above)]
        ids = np.sort(np.concatenate([above, equal]))
    else:
        ids = np.arange(size)
    return ids[np.argsort(-values_V[ids], kind="stable")]


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Indexes of the smallest set, likeliest first, whose weight reaches ``top_p`` of all.

    Those above a bound are the likeliest ones: only they are sorted, and the bound is lowered until they
    reach the target.
    """
    target = top_p * weights.sum()
    bound = _STRONG
    while True:
        likely = np.flatnonzero(weights >= bound) if bound else np.arange(len(weights))
        order = likely[np.argsort(-weights[likely], kind="stable")]
        cumulative = np.cumsum(weights[order])
        enough = int(np.searchsorted(cumulative, target, side="left"))
        if enough < len(order) or not bound:
            return order[: enough + 1]
        bound = bound / 16 if bound > 1e-12 else 0.0
