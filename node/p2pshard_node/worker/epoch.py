"""One stage's active epoch: its edges, its step loop, and on the first stage the driver."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from p2pshard.credentials import Credentials
from p2pshard.errors import Conflict, P2PShardError, ProtocolError
from p2pshard.planning.plan import Plan
from p2pshard.transport.frames import Frame, Hello, Limits
from p2pshard_node.tasks import failure_of
from p2pshard_node.worker.carry import Content
from p2pshard_node.worker.driver import Driver
from p2pshard_node.worker.edges import EdgeClient, EdgeTerms, IncomingEdge, check_hello
from p2pshard_node.worker.executor import StageExecutor
from p2pshard_node.worker.naming import describe, stage_lost
from p2pshard_node.worker.step_loop import StepLoop

__all__ = ["ActiveEpoch"]

_WATCH_S = 0.2
_PROBE_RETRY_S = 1.0
_SAY_AFTER_S = 1.0
"""A state that passes sooner is not reported as not ready."""
_FORWARD = frozenset({"step", "error", "ping"})
_BACK = frozenset({"tokens", "error", "ping"})

log = logging.getLogger(__name__)


class ActiveEpoch:
    """Made at activation, closed when another epoch, or none, takes its place.

    `tell(event)` sends an event to the daemon.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        *,
        deployment: str,
        instance: str,
        fingerprint: str,
        limits: Limits,
        window: int,
        executor: StageExecutor,
        thread: ThreadPoolExecutor,
        next_target: str | None,
        back_target: str | None,
        credentials: Credentials | None,
        content: Content = (),
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self.plan, self.index = plan, index
        self._last = len(plan.stages) - 1
        self._tell = tell
        self._lost: P2PShardError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._incoming: IncomingEdge | None = None
        self._serving: asyncio.Task[None] | None = None
        """Of the call that the incoming edge is."""
        edge = "back" if index == self._last else "forward"
        hello = Hello(deployment, plan.digest(), plan.manifest, fingerprint, instance, index, edge)
        self.terms = EdgeTerms(
            plan.epoch, hello, limits, plan.numerics == "invariant", plan.stages[index].wire
        )
        self.loop = StepLoop(
            executor, thread, depth=window, on_result=self._on_result, on_error=self._on_contradiction
        )
        self.driver: Driver | None = None
        if index == 0:
            self.driver = Driver(
                plan,
                deployment,
                window=window,
                vocab_size=limits.vocab_size,
                submit_step=self.loop.submit,
                content=content,
            )
        self._out: EdgeClient | None = None
        target = back_target if index == self._last else next_target
        if self._last > 0:
            if target is None:
                raise ProtocolError(f"{describe(plan, index)} was given no address to send to")
            self._peer = 0 if index == self._last else index + 1
            self._out = EdgeClient(
                target,
                self.terms,
                credentials,
                peer_stage=self._peer,
                depth=window,
                on_up=self._on_up,
                on_frame=self._on_returned,
                on_lost=self._on_out_lost,
            )
        self._pongs: dict[int, tuple[int, int, float]] = {}
        """(last step received, last computed, when heard) of each stage that answered."""

    def start(self) -> None:
        self._spawn(self.loop.run(), "steps")
        if self._out is not None:
            self._spawn(self._out.run(), "edge")
        if self.driver is not None:
            self._spawn(self._become_ready(self.driver), "readiness")
            self._spawn(self._watch(self.driver), "watchdog")

    def _spawn(self, coroutine: Any, name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if (error := failure_of(task, log, f"task {task.get_name()} failed")) is not None:
            self.lose(self.index, f"failed: {type(error).__name__}: {error}")

    async def close(self) -> None:
        """End the epoch: requests hear that another one took its place."""
        self._lost = self._lost or Conflict(f"epoch {self.plan.epoch.n} is over")
        if self.driver is not None:
            self.driver.break_off(self._lost)
        tasks = [*self._tasks, *([self._serving] if self._serving is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def over(self) -> bool:
        return self._lost is not None

    # -- losing ---------------------------------------------------------------------------------
    def lose(self, stage: int, what: str) -> None:
        """Stage `stage`, as seen from here, is lost: the epoch is over."""
        self._end(stage_lost(self.plan, stage, what))

    def _end(self, error: P2PShardError) -> None:
        """Once: tell the daemon, our requests, and both neighbours, with the name the failure already has."""
        if self._lost is not None:
            return
        self._lost = error
        log.error("epoch %s is over: %s", self.plan.epoch.n, error.message)
        epoch = self.plan.epoch.pair
        self._tell(
            {
                "ev": "edge_lost",
                "stage": error.details.get("stage", -1),
                "error": error.to_wire(),
                "epoch": epoch,
            }
        )
        if self.driver is not None:
            self.driver.break_off(error)
        frame = Frame("error", self.plan.epoch, error=error)
        if self._out is not None:
            self._out.send(frame)
        if self._incoming is not None:
            self._incoming.send_back(frame)

    def _on_out_lost(self, reason: str) -> None:
        self.lose(self._peer, f"is gone, as {describe(self.plan, self.index)} saw: {reason}")

    def _on_contradiction(self, error: ProtocolError) -> None:
        self.lose(self.index, f"was sent a step that contradicts its block table: {error.message}")

    # -- frames ---------------------------------------------------------------------------------
    def _on_result(self, frame: Frame) -> None:
        """A step computed here."""
        if self._out is None:
            assert self.driver is not None
            self.driver.on_tokens(frame)
        elif not self._out.send(frame):
            self.lose(self._peer, "takes no more steps")

    def _on_returned(self, frame: Frame) -> None:
        """What comes back on our own outgoing edge."""
        if frame.kind == "error":
            assert frame.error is not None
            self._end(self._named(frame.error, self._peer))
        elif frame.status is not None:
            stage, received, computed = frame.status
            self._pongs[stage] = (received, computed, time.monotonic())
            if self._incoming is not None and self.driver is None:
                self._incoming.send_back(frame)

    def _on_forward(self, frame: Frame) -> None:
        """From the stage before."""
        match frame.kind:
            case "step":
                self.loop.submit(frame)
            case "ping":
                status = (self.index, self.loop.received, self.loop.computed)
                assert self._incoming is not None
                self._incoming.send_back(replace(frame, kind="pong", status=status))
                if self._out is not None and self.index != self._last:
                    self._out.ping(frame)
            case _:
                self._take_error(frame)

    def _on_back(self, frame: Frame) -> None:
        """From the last stage to the driver."""
        assert self.driver is not None
        if frame.kind == "tokens":
            self.driver.on_tokens(frame)
        elif frame.kind == "error":
            self._take_error(frame)

    def _take_error(self, frame: Frame) -> None:
        assert frame.error is not None and self._incoming is not None
        self._end(self._named(frame.error, self._incoming.peer_stage))

    def _named(self, error: P2PShardError, neighbour: int) -> P2PShardError:
        """An error without a stage of its own is the neighbour's."""
        if "layers" in error.details:
            return error
        return stage_lost(self.plan, neighbour, f"ended the epoch: {error.message}")

    # -- the incoming edge ----------------------------------------------------------------------
    async def accept(self, context: Any, hello: Frame) -> None:
        """Serve the stream that `hello` opened. Raises `Conflict` when it has no place in this epoch."""
        expected, edge = (self._last, "back") if self.index == 0 else (self.index - 1, "forward")
        check_hello(self.terms, hello, stage=expected, edge=edge)
        if self._last == 0:
            raise Conflict("a plan of one stage has no edges")
        if self._lost is not None:
            raise Conflict(f"epoch {self.plan.epoch.n} is over: {self._lost.message}")
        if self._incoming is not None:
            raise Conflict(f"{describe(self.plan, expected)} is connected already")
        kinds, take = (_BACK, self._on_back) if self.index == 0 else (_FORWARD, self._on_forward)
        self._serving = asyncio.current_task()
        incoming = self._incoming = IncomingEdge(
            context, self.terms, peer_stage=expected, edge=edge, kinds=kinds
        )
        reason = "is gone (its stream was cut)"
        try:
            reason = await incoming.run(take)
        finally:
            self._incoming = self._serving = None
            self.lose(expected, f"{reason}, as {describe(self.plan, self.index)} saw")

    # -- readiness and the watchdog -------------------------------------------------------------
    def _on_up(self) -> None:
        log.info("edge to %s is up", describe(self.plan, self._peer))

    def _missing_edge(self) -> str:
        """Why not every edge that the driver sees is up; empty when all are."""
        if self._out is not None and not self._out.up:
            return f"no edge to {describe(self.plan, self._peer)}: {self._out.problem}"
        if self._last > 0 and self._incoming is None:
            return f"{describe(self.plan, self._last)} has not opened its stream of tokens yet"
        return ""

    async def _become_ready(self, driver: Driver) -> None:
        """Ready is one real token through every edge; until then say why not, and try again."""
        said, began = "", time.monotonic()
        epoch = self.plan.epoch.pair

        def say(reason: str) -> None:
            nonlocal said
            if reason and reason != said and time.monotonic() - began > _SAY_AFTER_S:
                said = reason
                self._tell({"ev": "not_ready", "reason": reason, "epoch": epoch})

        while self._lost is None:
            while self._lost is None and (missing := self._missing_edge()):
                say(missing)
                await asyncio.sleep(0.02)
            if self._lost is not None:
                return
            probe = asyncio.create_task(driver.probe())
            try:
                while not probe.done():
                    await asyncio.wait([probe], timeout=0.5)
                    if not probe.done():
                        say(f"a token is under way through all stages; {self._whereabouts(driver)}")
                probe.result()
            except P2PShardError as error:
                began = 0.0
                say(error.message)
                await asyncio.sleep(_PROBE_RETRY_S)
                continue
            finally:
                probe.cancel()
            self._tell({"ev": "ready", "epoch": epoch})
            return

    async def _watch(self, driver: Driver) -> None:
        """Notice a stage that neither answers nor breaks, and find out which it is."""
        while self._lost is None:
            await asyncio.sleep(_WATCH_S)
            late = driver.late()
            if late is None:
                continue
            step, silent, allowed = late
            if silent > min(1.0, allowed / 4) and self._out is not None:
                self._out.ping(Frame("ping", self.plan.epoch, step))
            if silent > allowed and driver.ready:
                stage, what = self._blame(step)
                self.lose(stage, f"{what}; step {step} is {silent:.1f} s late, {allowed:.1f} s are allowed")

    def _whereabouts(self, driver: Driver) -> str:
        late = driver.late()
        if late is None:
            return "it is about to start"
        stage, what = self._blame(late[0])
        return f"{describe(self.plan, stage)} {what}"

    def _blame(self, step: int) -> tuple[int, str]:
        """The first stage that step `step` has not left, as the pongs of the last second tell."""
        if self.loop.computed < step:
            return 0, "is still computing"
        now = time.monotonic()
        for stage in range(1, self._last + 1):
            received, computed, heard = self._pongs.get(stage, (0, 0, -10.0))
            if now - heard > 1.0:
                return stage, "has been silent"
            if received < step:
                return stage, "answers, but the step has not reached it"
            if computed < step:
                return stage, "answers, but is stuck computing"
        return self._last, "has computed, but its tokens have not come back"
