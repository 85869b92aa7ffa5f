"""Which member coordinates: sticky, so that a returning lower id does not take over. Pure.

Coordinating is a matter of convenience, not of safety: two coordinators at once cost time, and epochs order
what they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

__all__ = ["choose"]


def choose(
    me: str, followed: str, members: Collection[str], claims: Mapping[str, str], *, settled: bool
) -> str:
    """The id to follow now; empty: nobody yet.

    ``members`` includes this node; ``claims`` is whom each other member follows. ``settled``: this node has been
    up long enough to have heard of a coordinator if there is one; before that it appoints nobody. Nor does it while
    a member follows one that this node does not reach: that one may be alive, with only the link between them cut.
    """
    said = {**{n: c for n, c in claims.items() if n in members and c in members}, me: followed}
    leaders = {n for n, c in said.items() if n == c}
    if leaders:
        if followed in leaders and len(leaders) == 1:
            return followed
        # Two halves have met: the one that more follow stays, else the lower id.
        votes = Counter(said.values())
        return min(leaders, key=lambda n: (-votes[n], n))
    if followed in members and followed != me and not claims.get(followed):
        return followed  # it has not said yet whom it follows
    beyond_reach = any(c and c not in members for n, c in claims.items() if n in members)
    return min(members) if settled and not beyond_reach else ""
