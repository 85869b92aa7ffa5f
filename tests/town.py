"""A cluster of four daemons in which three have a stage each, and answers under way while nodes come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from p2pshard import Client
from p2pshard.errors import P2PShardError
from tests.local_cluster import LocalCluster, Node
from tests.tiny import write_tiny_llama
from tests.waiting import until

PROMPT = "Once upon a time in a small town"
COUNT = 60
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {
        "temperature": 0.9,
        "seed": 7,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    {"temperature": 0.9, "seed": 11, "logprobs": 3, "speculation": "adaptive"},
]


def whole_answer(client: Client, prompt: str, count: int = COUNT, **options: Any) -> Any:
    return client.generate("tiny", prompt, max_tokens=count, ignore_eos=True, **options).result()


def stages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a deployment as `status` has it."""
    return list(row["plan"]["replicas"][0]["stages"])


class Town:
    """Four daemons, three of them with a stage each; who is who changes with every loss."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    def up(self) -> list[Node]:
        return [n for n in self.cluster.nodes if n.process is not None and n.process.poll() is None]

    def row(self, at: Node | None = None) -> dict[str, Any]:
        rows = self.cluster.status(at or self.up()[0]).get("deployments") or [{}]
        return dict(rows[0])

    def names(self) -> dict[str, str]:
        return {n["id"]: n["name"] for node in self.up() for n in self.cluster.status(node).get("nodes", ())}

    def named(self, name: str) -> Node:
        return next(n for n in self.cluster.nodes if n.name == name)

    def stages(self) -> list[dict[str, Any]]:
        return stages_of(self.row())

    def undisturbed(self, count: int = COUNT) -> list[Any]:
        """What is asked for, answered."""
        with Client([self.up()[0].address]) as client:
            whole = [whole_answer(client, PROMPT, count, **a) for a in ASKED]
        assert self.row()["plan"]["numerics"] == "invariant"
        return whole

    def holders(self) -> list[Node]:
        names = self.names()
        return [self.named(names[s["ranks"][0]["node"]]) for s in self.stages()]

    def spare(self) -> Node:
        return next(n for n in self.up() if n not in self.holders())

    def coordinator(self) -> Node:
        return self.named(self.names()[self.cluster.status(self.up()[0])["coordinator"]])

    def who(self, role: str) -> Node:
        if role == "coordinator":
            return self.coordinator()
        return self.holders()[{"first": 0, "middle": 1, "last": 2}[role]]

    def besides(self, *victims: Node) -> Node:
        """A node that goes on when those are lost."""
        return next(n for n in self.up() if n not in victims)

    def restore(self) -> None:
        """Every node up and a member, the deployment ready."""
        for node in self.cluster.nodes:
            if node.process is None or node.process.poll() is not None:
                node.start(peers=[n for n in self.cluster.nodes if n is not node])
        self.cluster.wait_members(len(self.cluster.nodes), 30)
        for row in self.cluster.status(self.cluster.nodes[0])["nodes"]:
            if row["state"] == "paused":
                with Client([self.cluster.nodes[0].address]) as client:
                    client.resume(row["name"])
        self.cluster.wait_measured(60)
        until(lambda: self.row().get("state") == "ready", 60, lambda: str(self.row()))


class Asking:
    """Answers under way, one thread each, all of one gateway. ``asked``: of each the prompt and options."""

    def __init__(
        self,
        at: list[Node],
        count: int = COUNT,
        *,
        model: str = "tiny",
        asked: Sequence[tuple[str | Sequence[int], dict[str, Any]]] = tuple((PROMPT, a) for a in ASKED),
        **options: Any,
    ) -> None:
        self.count, self.model, self.asked = count, model, asked
        self.answers: list[Any] = [None] * len(asked)
        self.counts = [0] * len(asked)
        self.longest = [0.0] * len(asked)
        """Seconds between two pieces of an answer, and before the first."""
        self._streams: dict[int, Any] = {}
        self._threads = [
            threading.Thread(target=self._one, args=(i, [n.address for n in at], options))
            for i in range(len(asked))
        ]
        for thread in self._threads:
            thread.start()

    def _one(self, i: int, addresses: list[str], options: dict[str, Any]) -> None:
        prompt, asked = self.asked[i]
        try:
            with Client(addresses) as client:
                stream = self._streams[i] = client.generate(
                    self.model, prompt, max_tokens=self.count, ignore_eos=True, **asked, **options
                )
                last = time.monotonic()
                for delta in stream:
                    now = time.monotonic()
                    self.longest[i], last = max(self.longest[i], now - last), now
                    self.counts[i] += len(delta.tokens)
                self.answers[i] = stream.result()
        except P2PShardError as error:
            self.answers[i] = error

    def cancel(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def given(self, count: int, seconds: float = 30) -> None:
        until(
            lambda: min(self.counts) >= count,
            seconds,
            lambda: f"{count} tokens each: {self.counts}",
            every=0.002,
        )

    def join(self, seconds: float = 60) -> list[Any]:
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(timeout=max(0.0, end - time.monotonic()))
        assert not any(t.is_alive() for t in self._threads), self.counts
        return self.answers


def check(answers: list[Any], expected: list[Any]) -> None:
    for got, want in zip(answers, expected, strict=True):
        assert not isinstance(got, P2PShardError), got
        assert got.token_ids == want.token_ids and got.text == want.text
        assert got.finish_reason == want.finish_reason
        assert [(t.logprob, t.top) for t in got.tokens] == [(t.logprob, t.top) for t in want.tokens]


@contextmanager
def four_daemons(folder: Path, *flags: str, **settings: Any) -> Iterator[Town]:
    """Up, with the tiny model deployed."""
    path = write_tiny_llama(folder / "models" / "tiny", layers=12)
    with LocalCluster(folder, *(flags or ("--memory", "700MB")), nodes=4) as cluster:
        cluster.wait_measured()
        with Client([cluster.nodes[0].address]) as client:
            client.deploy(str(path), **{"context": 1024, "concurrency": 8, "dtype": "int8", **settings})
        yield Town(cluster)
