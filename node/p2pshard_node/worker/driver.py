"""The driver: takes requests from gateways, keeps the pipeline full, hands sampled tokens back.

Lives in the first stage's worker. Which tokens go into a step is the scheduler's policy; here is what moves.
Single-threaded on the worker's event loop, and nothing in it waits for a gateway or an edge.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from p2pshard.errors import (
    Conflict,
    ContextExceeded,
    InvalidRequest,
    NotReady,
    Overloaded,
    P2PShardError,
    ProtocolError,
)
from p2pshard.planning.plan import Plan
from p2pshard.sampling import SamplingParams
from p2pshard.speculation import check_draft
from p2pshard.transport.channels import EOF, abort_with
from p2pshard.transport.frames import Admitted, Deltas, Frame, Hop, RowHeader, SampledToken
from p2pshard.transport.generated import generate_pb2
from p2pshard.transport.grpc_errors import error_to_proto
from p2pshard_node.scheduling.prefix import root_key
from p2pshard_node.scheduling.scheduler import Scheduler
from p2pshard_node.scheduling.step import Request, Step, StepRow
from p2pshard_node.worker.carry import Content
from p2pshard_node.worker.outbox import Outbox
from p2pshard_node.worker.pace import Pace
from p2pshard_node.worker.trace import Trip, TripWindow

__all__ = ["DRIVER_METHOD", "Driver"]

DRIVER_METHOD = "/p2pshard.v1.Data/Driver"
_HELLO_TIMEOUT_S = 5.0
_MAX_EOS = 256

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Gateway:
    name: str
    outbox: Outbox


@dataclass(eq=False)
class _Running:
    """One attempt of one request."""

    sequence: int
    request: str
    attempt: int
    gateway: _Gateway | None
    """None: our own probe."""
    prompt_length: int
    sampling: SamplingParams
    replay_to: int = 0
    """Position up to which another driver had computed it; 0: it begins here."""
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True)
class _Flight:
    step: Step
    sent: float


class Driver:
    """`submit_step(frame)` starts a step on the first stage; `on_tokens` takes it back from the last."""

    def __init__(
        self,
        plan: Plan,
        deployment: str,
        *,
        window: int,
        vocab_size: int,
        submit_step: Callable[[Frame], None],
        max_waiting: int = 256,
        content: Content = (),
    ) -> None:
        """``content``: what the epoch before left in the pool, for whoever begins like it."""
        self._plan, self._deployment, self._vocab = plan, deployment, vocab_size
        self._scheduler = Scheduler(
            blocks=plan.blocks,
            block_size=plan.block_size,
            chunk_tokens=plan.chunk_tokens,
            window=window,
            context=plan.context,
            max_waiting=max_waiting,
            root=root_key(plan),
        )
        self._scheduler.blocks.inherit(content)
        self.content: Content = ()
        """What this epoch leaves, once it is over."""
        self._probe_hops: tuple[Hop, ...] = ()
        self._submit_step = submit_step
        self.ready = False
        self.broken: P2PShardError | None = None
        """Why this epoch no longer serves."""
        self._sequences: dict[int, _Running] = {}
        self._requests: dict[str, _Running] = {}
        # 64 bit and never used twice, in no epoch of the deployment.
        self._ids = itertools.count(((plan.epoch.n & 0xFFFFFF) << 40) + 1)
        self._flights: dict[int, _Flight] = {}
        self._progress_at = 0.0
        """When a step last returned."""
        self._pump_due = False
        self._probe: asyncio.Future[None] | None = None
        self.pace = Pace()
        self._steps = self._tokens = self._most_rows = self._replayed = 0
        self._trips = TripWindow(len(plan.stages))

    # -- what it is doing -----------------------------------------------------------------------
    @property
    def sequences(self) -> int:
        return len(self._sequences)

    def stats(self) -> dict[str, Any]:
        """For ``{ev: stats}``: counts since activation, times over the last steps."""
        return {
            "count": self._steps,
            "tokens": self._tokens,
            "max_rows": self._most_rows,
            "replayed": self._replayed,
            "in_flight": self._scheduler.in_flight,
            "waiting": self._scheduler.waiting,
            "window": self._scheduler.window,
            **asdict(self._scheduler.counts),
            "blocks_kept": self._scheduler.blocks.kept,
            "trace": self._trips.report(under_way=bool(self._flights)).to_json(),
        }

    def late(self) -> tuple[int, float, float] | None:
        """(oldest step under way, seconds without progress, seconds allowed); None when none is."""
        if not self._flights:
            return None
        flight = next(iter(self._flights.values()))
        silent = time.monotonic() - max(flight.sent, self._progress_at)
        return flight.step.number, silent, self.pace.allowance(max(1, flight.step.tokens))

    # -- steps ----------------------------------------------------------------------------------
    def _pump_soon(self) -> None:
        """Once this round of the event loop is done, so that requests arriving together share a step."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        while self.broken is None and (step := self._scheduler.next_step()) is not None:
            self._flights[step.number] = _Flight(step, time.monotonic())
            for sequence in step.admitted:
                running = self._sequences.get(sequence)
                if running is not None and running.gateway is not None:
                    running.gateway.outbox.started(running.request, running.attempt)
            self._submit_step(self._frame(step))

    def _frame(self, step: Step) -> Frame:
        ids = [i for row in step.rows for i in row.token_ids]
        admitted = (self._sequences[s] for s in step.admitted)
        return Frame(
            "step",
            self._plan.epoch,
            step.number,
            rows=tuple(RowHeader(r.sequence, r.start, len(r.token_ids), _output(r)) for r in step.rows),
            token_ids_T=np.array(ids, np.int32),
            deltas=Deltas(free=step.freed, share=step.shared, allocate=step.allocated),
            admitted=tuple(Admitted(a.sequence, a.prompt_length, a.sampling) for a in admitted),
        )

    def on_tokens(self, frame: Frame) -> None:
        """Take a step back. Raises `ProtocolError` when none such is under way, or when it is not whole."""
        flight = self._flights.pop(frame.step, None)
        if flight is None:
            raise ProtocolError(f"tokens of step {frame.step}, which is not under way")
        answered = {t.sequence for t in frame.tokens} | {s for s, _ in frame.failed}
        for row in flight.step.rows:
            if row.sample and row.sequence not in answered:
                raise ProtocolError(f"step {frame.step} has no token for sequence {row.sequence}")
        self._account(flight, frame)
        self._probe_hops = self._probe_hops or frame.hops
        tokens: dict[int, list[SampledToken]] = {}
        for token in frame.tokens:
            tokens.setdefault(token.sequence, []).append(token)
        ids = {sequence: [t.id for t in found] for sequence, found in tokens.items()}
        for advance in self._scheduler.complete(frame.step, ids, {s for s, _ in frame.failed}):
            running = self._sequences.get(advance.sequence)
            if running is None:
                continue
            self._give(running, advance.index, tokens[advance.sequence].pop(0))
            if advance.finished:
                self._finish(running, advance.finished)
        for sequence, error in frame.failed:
            running = self._sequences.get(sequence)
            if running is not None:
                self._fail(running, error)
        self._pump()

    def _account(self, flight: _Flight, frame: Frame) -> None:
        now = time.monotonic()
        trip = now - flight.sent
        self._progress_at = now
        if not flight.step.rows:
            return
        self.pace.observe(flight.step.tokens, trip)
        self._steps += 1
        self._tokens += len(frame.tokens)
        self._most_rows = max(self._most_rows, sum(r.sample for r in flight.step.rows))
        prefill = False
        for row in flight.step.rows:
            if (running := self._sequences.get(row.sequence)) is not None:
                prefill |= row.start < running.prompt_length
                self._replayed += min(len(row.token_ids), max(0, running.replay_to - row.start))
        self._trips.add(Trip(flight.sent, now, flight.step.tokens, prefill, frame.hops, frame.arrival))

    # -- ends -----------------------------------------------------------------------------------
    def _give(self, running: _Running, index: int, token: SampledToken) -> None:
        if running.gateway is None:
            return
        message = generate_pb2.Token(
            id=token.id,
            logprob=token.logprob,
            top=[generate_pb2.TokenLogprob(id=i, logprob=p) for i, p in token.top],
        )
        running.gateway.outbox.token(running.request, running.attempt, index, message)

    def _drop(self, running: _Running) -> None:
        """Forget a request; the scheduler has ended it, or does now."""
        self._scheduler.cancel(running.sequence)
        self._sequences.pop(running.sequence, None)
        if self._requests.get(running.request) is running:
            del self._requests[running.request]
        if running.timer is not None:
            running.timer.cancel()
        self._pump_soon()  # its blocks go back at once, with a step of their own when nothing else runs

    def _finish(self, running: _Running, reason: str) -> None:
        self._drop(running)
        if running.gateway is None:
            if self._probe is not None and not self._probe.done():
                self._probe.set_result(None)
            return
        running.gateway.outbox.finished(running.request, running.attempt, reason)

    def _fail(self, running: _Running, error: P2PShardError) -> None:
        self._drop(running)
        if running.gateway is None:
            if self._probe is not None and not self._probe.done():
                self._probe.set_exception(error)
            return
        self._refuse(running.gateway, running.request, running.attempt, error)

    @staticmethod
    def _refuse(gateway: _Gateway, request: str, attempt: int, error: P2PShardError) -> None:
        gateway.outbox.failed(request, attempt, error_to_proto(error))

    def break_off(self, error: P2PShardError) -> None:
        """The epoch is over: every request hears `error`, and later ones too."""
        if self.broken is not None:
            return
        self.broken, self.ready = error, False
        self.content = self._scheduler.content()
        for running in list(self._sequences.values()):
            self._fail(running, error)

    # -- readiness ------------------------------------------------------------------------------
    async def probe(self) -> None:
        """Send one token through every stage. Returns when it came back; raises what a stage failed with."""
        running = _Running(next(self._ids), "", 0, None, 1, SamplingParams())
        self._probe = asyncio.get_running_loop().create_future()
        self._sequences[running.sequence] = running
        self._scheduler.add(Request(running.sequence, (0,), 1))
        self._pump_soon()
        await self._probe
        if not all(hop.kept for hop in self._probe_hops):
            self._scheduler.blocks.forget()  # some stage lacks what the epoch before left
        self.ready = True

    # -- gateways -------------------------------------------------------------------------------
    async def serve(self, context: Any) -> None:
        """One gateway's stream: commands in, events out. When it ends, its requests are cancelled."""
        hello = await self._hello(context)
        gateway = _Gateway(hello.gateway, Outbox())
        await context.write(generate_pb2.DriverEvent(hello=hello).SerializeToString())
        tasks: set[asyncio.Task[P2PShardError | None]] = {
            asyncio.create_task(self._write(context, gateway)),
            asyncio.create_task(self._deaf(gateway)),
            asyncio.create_task(self._read(context, gateway)),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = done.pop()
            error = (
                None if ended.cancelled() else ended.result()
            )  # gRPC cancels a read of a stream that is gone
        finally:
            for task in tasks:
                task.cancel()
            for running in [r for r in self._sequences.values() if r.gateway is gateway]:
                self._drop(running)
            await asyncio.gather(*tasks, return_exceptions=True)
        if error is not None:
            await abort_with(context, error)

    async def _hello(self, context: Any) -> generate_pb2.DriverHello:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                data = await context.read()
            command = generate_pb2.DriverCommand.FromString(b"" if data is EOF else data)
        except (TimeoutError, DecodeError):
            await abort_with(context, ProtocolError("the first message of a driver stream must be its hello"))
        hello = command.hello
        if not command.HasField("hello"):
            await abort_with(context, ProtocolError("the first message of a driver stream must be its hello"))
        epoch = self._plan.epoch.to_proto()
        if (
            hello.epoch != epoch
            or hello.plan_digest != self._plan.digest()
            or hello.deployment != self._deployment
        ):
            await abort_with(
                context,
                Conflict(
                    f"this driver serves epoch {epoch.n} of {epoch.proposer} of {self._deployment}; "
                    f"the gateway asked for epoch {hello.epoch.n} of {hello.epoch.proposer}, or another plan"
                ),
            )
        if self.broken is not None:
            await abort_with(context, self.broken)
        return hello

    async def _write(self, context: Any, gateway: _Gateway) -> None:
        while True:
            await context.write(await gateway.outbox.get())

    async def _deaf(self, gateway: _Gateway) -> P2PShardError:
        await gateway.outbox.overflow()  # the writer may never come back from the message that it is at
        return Overloaded(f"gateway {gateway.name} does not read its events", retry_after_s=1.0)

    async def _read(self, context: Any, gateway: _Gateway) -> P2PShardError | None:
        while (data := await context.read()) is not EOF:
            try:
                command = generate_pb2.DriverCommand.FromString(data)
            except DecodeError:
                return ProtocolError("bytes that are no DriverCommand")
            match command.WhichOneof("command"):
                case "submit":
                    self._take(gateway, command.submit)
                case "cancel":
                    self._cancel(gateway, command.cancel)
                case other:
                    return ProtocolError(f"a command of kind {other} has no place here")
        return None

    def _take(self, gateway: _Gateway, submit: generate_pb2.Submit) -> None:
        """Queue a request, or answer at once why not."""
        try:
            self._submit(gateway, submit)
        except P2PShardError as error:
            self._refuse(gateway, submit.request, submit.attempt, error)

    def _submit(self, gateway: _Gateway, submit: generate_pb2.Submit) -> None:
        if self.broken is not None:
            raise self.broken
        if not self.ready:
            raise NotReady(
                "no token has crossed all stages of this epoch yet", state="loading", reason="not ready"
            )
        older = self._requests.get(submit.request)
        if older is not None and older.attempt >= submit.attempt:
            raise Conflict(f"attempt {older.attempt} of request {submit.request} runs here already")
        self._check(submit)
        sampling = SamplingParams.from_proto(submit.sampling)
        if older is not None:
            self._fail(older, Conflict(f"attempt {submit.attempt} took over"))
        given = tuple(submit.output_ids)
        running = _Running(
            next(self._ids),
            submit.request,
            submit.attempt,
            gateway,
            len(submit.prompt_ids),
            sampling,
            len(submit.prompt_ids) + len(given) - 1 if given else 0,
        )
        ended = "stop" if given and given[-1] in submit.eos_ids else ""
        if ended or len(given) >= submit.max_tokens:
            self._finish(running, ended or "length")
            return
        self._scheduler.add(
            Request(
                running.sequence,
                tuple(submit.prompt_ids),
                submit.max_tokens,
                given,
                frozenset(submit.eos_ids),
                submit.draft,
            )
        )
        self._sequences[running.sequence] = self._requests[submit.request] = running
        if submit.deadline_s > 0:
            loop = asyncio.get_running_loop()
            running.timer = loop.call_later(submit.deadline_s, self._finish, running, "deadline")
        self._pump_soon()

    def _check(self, submit: generate_pb2.Submit) -> None:
        prompt = len(submit.prompt_ids)
        if not submit.request or not prompt or submit.max_tokens < 1 or len(submit.eos_ids) > _MAX_EOS:
            raise InvalidRequest(
                "a request needs an id, a prompt of at least one token and max_tokens of at least 1"
            )
        check_draft(submit.draft)
        if prompt >= self._plan.context:
            raise ContextExceeded(
                f"the prompt has {prompt} tokens, the context of {self._plan.model} holds "
                f"{self._plan.context} and needs room for one more; shorten it or deploy with more --context",
                prompt_tokens=prompt,
                context=self._plan.context,
            )
        highest = max(itertools.chain(submit.prompt_ids, submit.output_ids))
        if highest >= self._vocab:
            raise InvalidRequest(f"token id {highest} is outside the vocabulary of {self._vocab}")

    def _cancel(self, gateway: _Gateway, cancel: generate_pb2.CancelRequest) -> None:
        running = self._requests.get(cancel.request)
        if running is not None and running.gateway is gateway and running.attempt <= cancel.attempt:
            self._finish(running, "cancelled")


def _output(row: StepRow) -> str:
    """What the last stage is to do with a row's logits."""
    if not row.sample:
        return "none"
    return "verify" if row.drafted else "sample"
