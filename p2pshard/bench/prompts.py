"""Prompts of an exact number of tokens, told apart from their first token on. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from p2pshard.errors import InvalidRequest

__all__ = ["SAMPLE", "draw_prompts"]

SAMPLE = (
    "The harbour was quiet before sunrise. Two fishermen mended a green net beside the lighthouse, while a baker "
    "carried warm bread across the narrow bridge. Clouds gathered slowly over distant mountains; nobody expected "
    "rain until evening. Children counted coloured stones, an engineer sketched wooden wheels, and seven geese "
    "walked past the old market without any hurry. Later that afternoon, letters arrived from friends abroad, "
    "describing deep forests, frozen lakes, crowded railway stations, expensive violins, and music played under "
    "lanterns. Winter would bring its usual questions: who owns this orchard, how much coal remains, which road "
    "leads home? Everyone promised to answer honestly, although some answers had already been forgotten."
)
"""Text whose token ids stand for ordinary ones of any vocabulary."""


def draw_prompts(
    known_ids: Sequence[int], count: int, length: int, rng: random.Random, *, shared_prefix: bool = False
) -> list[list[int]]:
    """``count`` prompts of ``length`` token ids, drawn from ``known_ids``.

    They differ from the first token on (from the second at the latest, when there are more prompts than ids), so
    that no prefix cache can serve one from another. With ``shared_prefix`` they differ in their last two alone.

    Raises:
        InvalidRequest: no ids, or too few for so many different prompts.
    """
    ids = sorted(set(known_ids))
    if count > len(ids) ** min(2, length):
        raise InvalidRequest(f"{len(ids)} token ids do not make {count} different prompts of {length} tokens")
    rng.shuffle(ids)
    marks = [(ids[i % len(ids)], ids[(i + i // len(ids)) % len(ids)]) for i in range(count)]
    rest = max(0, length - 2)
    if shared_prefix:
        common = rng.choices(ids, k=rest)
        return [[*common, *reversed(mark)][-length:] for mark in marks]
    return [[*mark, *rng.choices(ids, k=rest)][:length] for mark in marks]
