"""Who can reach whom, how fast: a matrix that members gossip. Pure.

A sample is directed: ``from`` called ``to`` and was answered. A plan's edge needs a link that both ends
have seen to work in the last `WINDOW_S`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from p2pshard.transport.generated import control_pb2 as pb

__all__ = ["WINDOW_S", "Link", "Links"]

WINDOW_S = 10.0


@dataclass(frozen=True)
class Link:
    """One direction, as its caller last measured it."""

    seen: float
    """Monotonic seconds of this process."""
    rtt_ms: float
    bandwidth_mbps: float
    """0: not measured."""


class Links:
    """The matrix; bounded by forgetting nodes that are no members (`keep`)."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], Link] = {}

    def observe(
        self, source: str, target: str, now: float, rtt_ms: float, bandwidth_mbps: float = 0.0
    ) -> None:
        """Take a measurement of our own. A bandwidth of 0 keeps the one measured before."""
        before = self._links.get((source, target))
        kept = bandwidth_mbps or (before.bandwidth_mbps if before else 0.0)
        self._links[source, target] = Link(now, rtt_ms, kept)

    def merge(self, samples: Iterable[pb.LinkSample], me: str, members: Collection[str], now: float) -> None:
        """Take what another member says of links that are not ours to measure; the freshest wins."""
        for sample in samples:
            source, target = getattr(sample, "from"), sample.to
            if source == me or source not in members or target not in members or not sample.age_s >= 0:
                continue
            link = Link(now - sample.age_s, sample.rtt_ms, sample.bandwidth_mbps)
            known = self._links.get((source, target))
            if known is None or link.seen > known.seen:
                self._links[source, target] = link

    def keep(self, members: Collection[str]) -> None:
        """Forget links of nodes that are not members."""
        self._links = {k: v for k, v in self._links.items() if k[0] in members and k[1] in members}

    def samples(self, now: float) -> list[pb.LinkSample]:
        """What we tell others: ages, never times, for clocks differ."""
        return [
            pb.LinkSample(
                **{"from": s},
                to=t,
                age_s=now - link.seen,
                rtt_ms=link.rtt_ms,
                bandwidth_mbps=link.bandwidth_mbps,
            )
            for (s, t), link in self._links.items()
            if now - link.seen <= 3 * WINDOW_S
        ]

    def get(self, source: str, target: str) -> Link | None:
        return self._links.get((source, target))

    def last_seen(self, target: str, without: str) -> float:
        """When any node but one last had an answer from `target`, as far as it was told; minus infinity: never."""
        return max(
            (link.seen for (s, t), link in self._links.items() if t == target and s != without),
            default=float("-inf"),
        )

    def usable(self, now: float) -> dict[tuple[str, str], Link]:
        """Directed links of pairs that both ends saw working within the window."""

        def fresh(pair: tuple[str, str]) -> bool:
            link = self._links.get(pair)
            return link is not None and now - link.seen <= WINDOW_S

        return {pair: link for pair, link in self._links.items() if fresh(pair) and fresh((pair[1], pair[0]))}
