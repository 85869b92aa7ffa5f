"""The link matrix: what is fresh, from both ends, and what others may say about it."""

from __future__ import annotations

from p2pshard_node.cluster.links import WINDOW_S, Links

from p2pshard.transport.generated import control_pb2 as pb


def sample(source: str, target: str, age: float, rtt: float = 1.0) -> pb.LinkSample:
    return pb.LinkSample(**{"from": source}, to=target, age_s=age, rtt_ms=rtt)  # type: ignore[arg-type]


def test_an_edge_needs_both_ends_within_the_window() -> None:
    links = Links()
    links.observe("a", "b", 100.0, 1.0)
    assert links.usable(100.0) == {}
    links.merge([sample("b", "a", 2.0)], "a", {"a", "b"}, 100.0)
    assert set(links.usable(100.0)) == {("a", "b"), ("b", "a")}
    assert links.usable(98.0 + WINDOW_S + 0.1) == {}  # b's own was two seconds older


def test_ages_travel_not_times_and_the_freshest_wins() -> None:
    here, there = Links(), Links()
    there.observe("b", "c", 5.0, 3.0)  # another clock
    (said,) = there.samples(6.0)
    here.merge([said], "a", {"a", "b", "c"}, 1000.0)
    here.merge([sample("b", "c", 9.0, rtt=99.0)], "a", {"a", "b", "c"}, 1000.0)
    link = here.get("b", "c")
    assert link is not None and (link.seen, link.rtt_ms) == (999.0, 3.0)


def test_nobody_speaks_for_our_own_links_for_strangers_or_for_the_future() -> None:
    links = Links()
    lies = [sample("a", "b", 0.0), sample("x", "b", 0.0), sample("b", "x", 0.0), sample("b", "c", -5.0)]
    links.merge([*lies, sample("b", "c", float("nan"))], "a", {"a", "b", "c"}, 10.0)
    assert links.samples(10.0) == []


def test_bandwidth_stays_until_it_is_measured_again_and_nodes_that_left_are_forgotten() -> None:
    links = Links()
    links.observe("a", "b", 1.0, 1.0, 940.0)
    links.observe("a", "b", 2.0, 1.5)
    link = links.get("a", "b")
    assert link is not None and (link.bandwidth_mbps, link.rtt_ms) == (940.0, 1.5)
    links.keep({"a"})
    assert links.get("a", "b") is None
