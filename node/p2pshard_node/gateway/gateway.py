"""The gateway: takes a request at any node, carries it to the driver of its model and its tokens back.

It holds each request's log until the client has all of it. Nothing a client does or leaves undone holds up
another: tokens are taken by the stream's reading task, and a client that falls too far behind is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from p2pshard.addresses import host_port
from p2pshard.credentials import Credentials
from p2pshard.errors import (
    Cancelled,
    Conflict,
    ContextExceeded,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotReady,
    Overloaded,
    P2PShardError,
    ProtocolError,
    StageLost,
)
from p2pshard.planning.plan import Plan
from p2pshard.sampling import SamplingParams
from p2pshard.speculation import check_draft
from p2pshard.transport.generated import generate_pb2
from p2pshard.transport.grpc_errors import error_from_proto

from ..rounds import Rounds
from .driver_link import DriverLink
from .drivers import PASSING, Drivers, Joined
from .requests import Outcome, RequestTable
from .running import Running
from .templates import TemplateRenderer
from .tokenizer import TextModel, load_text_model
from .view import DeploymentView, TextStore

__all__ = ["DEFAULT_MAX_TOKENS", "MAX_MESSAGES", "Gateway", "Limits"]

DEFAULT_MAX_TOKENS = 1024
"""Of a request that names none; the context may allow fewer."""
MAX_MESSAGES = 10_000
"""Of a chat: more than any context holds, and few enough to be checked and rendered in a moment."""
_MAX_STOPS = 16
_MAX_STOP_CHARS = 1024
_DRAIN_LOOK_S = 0.05
_TEXT_MODELS = 4
_OTHER_GATEWAYS = 8
_ENCODERS = 2
_WATCH_S = 0.1
_DRIVER_REASONS = frozenset({"stop", "length", "cancelled", "deadline"})
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What one gateway carries."""

    requests: int = 256
    """At once, waiting ones included."""
    unread_tokens: int = 4096
    """That a client may leave unread before its request is cancelled."""
    unread_s: float = 60.0
    """Seconds that a client may leave something unread before its request is cancelled."""
    ready_s: float = 60.0
    """Seconds that a request without a deadline waits for a deployment that is planning or loading."""
    mend_s: float = 10.0
    """Seconds that a new one waits for a deployment that is broken."""
    recover_s: float = 60.0
    """Seconds that one which has lost its driver waits for the next."""


class Gateway:
    """Generates for clients of this node; its coroutines belong to one event loop."""

    def __init__(
        self,
        node_id: str,
        store: TextStore,
        view: DeploymentView,
        credentials: Credentials | None = None,
        *,
        limits: Limits = Limits(),
    ) -> None:
        self.node_id = node_id
        self._store = store
        self._view = view
        self._limits = limits
        self._table: RequestTable[Running] = RequestTable(limits.requests)
        self._drivers = Drivers(
            node_id,
            view,
            credentials,
            queue=4 * limits.requests,
            on_news=self._on_news,
            on_lost=self._on_lost,
        )
        self._texts: dict[str, asyncio.Task[TextModel]] = {}
        self._renderer = TemplateRenderer()
        # Of their own: long prompts hold up nothing else of the daemon that needs a thread.
        self._encoders = ThreadPoolExecutor(_ENCODERS, "encode")
        self._background: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._closed = self._draining = False

    # -- for clients ----------------------------------------------------------------------------
    async def generate(
        self, request: generate_pb2.GenerateRequest
    ) -> AsyncGenerator[generate_pb2.GenerateEvent, None]:
        """Resume record, text as it comes, finish. Closing the iterator cancels the request on every stage.

        The output ends with reason ``length`` at ``max_tokens`` and also where the context is full,
        whichever is first. Raises before the first event what is wrong with the request (`InvalidRequest`,
        `ContextExceeded`, `ModelNotFound`, `NotReady`, `Overloaded`), and after it what ended it
        (`StageLost`, `Conflict`, `Internal` and so on).
        """
        if self._closed or self._draining:
            raise NotReady("this node is stopping; ask another one", state="stopping", reason="shutdown")
        sampling = _sampling(request)
        _check(request)
        running = Running(
            uuid.uuid4().hex,
            request.model,
            tuple(request.stop),
            request.ignore_eos,
            self._limits.unread_tokens,
        )
        self._table.add(running)
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        deadline = None
        if request.deadline_s > 0:
            loop = asyncio.get_running_loop()
            running.deadline_at = loop.time() + request.deadline_s
            deadline = loop.call_at(running.deadline_at, self._too_late, running)
        try:
            record = await _unless_ended(running, self._start(running, request, sampling))
            yield generate_pb2.GenerateEvent(resume=record)
            while (delta := await running.next_delta()) is not None:
                yield generate_pb2.GenerateEvent(delta=delta)
            yield generate_pb2.GenerateEvent(finish=running.finish())
        finally:
            if deadline is not None:
                deadline.cancel()
            self._end(running, "cancelled")  # recorded first; nothing happens when the request has ended
            self._table.remove(running)

    def cancel(self, request_id: str) -> bool:
        """End a request of this gateway with reason ``cancelled``; False when it does not run here."""
        running = self._table.get(request_id)
        return running is not None and self._end(running, "cancelled")

    def outcome(self, request_id: str) -> Outcome | None:
        """How one of the last requests of this gateway ended."""
        return self._table.outcome(request_id)

    def ps(self) -> list[dict[str, object]]:
        """``[{id, model, state, prompt_tokens, completion_tokens}]`` of what came in here and runs."""
        return [r.to_json() for r in self._table if r.log.outcome is None]

    @property
    def streams(self) -> int:
        """Streams to drivers that are open or being opened."""
        return len(self._drivers)

    async def text_model(self, manifest: str) -> TextModel:
        """Tokenizer and template of a manifest digest, fetched from a member when this node lacks them."""
        task = self._texts.pop(manifest, None)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._load_text(manifest))
        self._texts[manifest] = task  # last used stands last
        while len(self._texts) > _TEXT_MODELS:
            del self._texts[next(iter(self._texts))]
        return await asyncio.shield(task)

    async def drain(self, seconds: float) -> None:
        """Take no more requests, and let those that run end, for so long."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.ps():
                    await asyncio.sleep(_DRAIN_LOOK_S)

    async def close(self) -> None:
        """End every request with `NotReady`, close every stream."""
        self._closed = True
        for running in self._table:
            self._fail(
                running,
                NotReady("this node is stopping; ask another one", state="stopping", reason="shutdown"),
            )
        tasks = [t for t in (self._watcher, *self._texts.values()) if t is not None]
        self._texts.clear()
        for task in (*tasks, *self._background):
            task.cancel()
        # Cancels just queued above travel by the end of the streams.
        await asyncio.gather(*tasks, self._drivers.close(), return_exceptions=True)
        await asyncio.gather(*self._background, return_exceptions=True)
        self._encoders.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._renderer.close)

    # -- the start of a request -----------------------------------------------------------------
    async def _start(
        self, running: Running, request: generate_pb2.GenerateRequest, sampling: SamplingParams
    ) -> generate_pb2.ResumeRecord:
        """Wait for the deployment, render and encode once, submit."""
        deployment = await self._drivers.ready(
            request.model,
            load_s=request.deadline_s or self._limits.ready_s,
            mend_s=request.deadline_s or self._limits.mend_s,
        )
        plan = Plan.from_proto(deployment.plan)
        text = await self.text_model(plan.manifest)
        prompt_ids = await self._prompt_ids(text, request, plan)
        if not prompt_ids:
            raise InvalidRequest("the prompt is empty", field="prompt")
        room = _room(len(prompt_ids), plan)
        running.prepare(text, prompt_ids, min(request.max_tokens or DEFAULT_MAX_TOKENS, room))
        running.deployment = deployment
        record = generate_pb2.ResumeRecord(
            request=running.id,
            seed=sampling.seed,
            prompt_ids=prompt_ids,
            manifest=plan.manifest,
            sampling=sampling.to_proto(),
            max_tokens=running.log.max_tokens,
            gateways=self._other_gateways(),
        )
        running.replay(request.resume.output_ids)
        if running.log.outcome is not None:  # what the client has of it is all
            record.plan_json = json.dumps(plan.to_json())
            return record
        try:
            joined = await self._drivers.join(deployment)
        except PASSING as error:
            running.trouble = error
            joined = await self._rejoin(running)
        running.submit = generate_pb2.Submit(
            request=running.id,
            prompt_ids=prompt_ids,
            sampling=sampling.to_proto(),
            max_tokens=running.log.max_tokens,
            eos_ids=running.eos_ids,
            draft=request.draft,
        )
        # No await from here on: an end that came between would find no driver to tell.
        if running.log.outcome is not None:
            raise Cancelled("the request ended before it reached its driver")
        self._submit(running, joined)
        record.plan_json = json.dumps(joined.plan.to_json())
        return record

    def _other_gateways(self) -> list[str]:
        """Where a client can go on when this node is gone: an address of each of some other members."""
        others = [n for n in self._view.members() if n.id != self.node_id and n.addresses]
        random.shuffle(others)
        addresses = (n.addresses[0] for n in others[:_OTHER_GATEWAYS])
        return [host_port(a.host, a.port) for a in addresses]

    def _submit(self, running: Running, joined: Joined) -> None:
        """Hand the request, with what has been given of it, to a driver."""
        assert running.submit is not None
        needed = len(running.prompt_ids) + running.log.max_tokens
        if joined.plan.context < needed:
            raise ContextExceeded(
                f"the members that are left serve {running.model} with a context of {joined.plan.context} tokens, and this "
                f"request needs {needed}; send it again with a smaller max_tokens",
                prompt_tokens=len(running.prompt_ids),
                context=joined.plan.context,
            )
        submit = running.submit
        submit.attempt = running.log.attempt
        submit.output_ids[:] = running.log.ids
        submit.deadline_s = running.time_left()
        running.handed_to(joined.deployment, joined.link)
        joined.link.send(generate_pb2.DriverCommand(submit=submit))
        if joined.link.lost is not None:
            self._lost(running, joined.link.lost)

    # -- the loss of a driver -------------------------------------------------------------------
    def _lost(self, running: Running, error: P2PShardError) -> None:
        """The driver of a request is gone. The request goes on with the next one, which is given its log."""
        if running.log.outcome is not None:
            return
        if not running.may_go_on(error):
            running.fail(error)
            return
        running.lost(error)
        self._spawn(self._carry_on(running))

    async def _carry_on(self, running: Running) -> None:
        try:
            joined = await self._rejoin(running)
            if running.log.outcome is None:  # nobody ended it meanwhile
                running.log.next_attempt()
                self._submit(running, joined)
                log.info(
                    "request %s goes on at epoch %s with %s tokens given",
                    running.id,
                    joined.plan.epoch.n,
                    len(running.log.ids),
                )
        except P2PShardError as error:
            running.fail(error)
        except Exception as error:
            log.exception("request %s was not carried on", running.id)
            running.fail(Internal(f"it could not be carried on: {type(error).__name__}: {error}"))

    async def _rejoin(self, running: Running) -> Joined:
        """The driver that follows the one lost, awaited until the deadline or for as long as a request without one waits."""
        assert running.deployment is not None

        def troubled(error: P2PShardError) -> None:
            running.trouble = error

        until = running.deadline_at or asyncio.get_running_loop().time() + self._limits.recover_s
        try:
            return await self._drivers.rejoin(running.deployment, troubled, until)
        except TimeoutError:
            raise self._given_up(running) from None

    def _given_up(self, running: Running) -> P2PShardError:
        """Nothing took the place of the driver that was lost: what was lost, and what is missing."""
        assert running.trouble is not None and running.deployment is not None
        lost = running.trouble
        reason, details = self._drivers.standing(running.deployment.id)
        waited = "before the deadline" if running.deadline_at else f"within {self._limits.recover_s:g} s"
        says = f": {reason}" if reason and lost.message not in reason else f" ({reason})" if reason else ""
        message = f"{lost.message}; nothing took its place {waited}{says}"
        return StageLost(message, **{**lost.details, **details})

    async def _load_text(self, manifest: str) -> TextModel:
        self._renderer.warm()
        text = await asyncio.to_thread(load_text_model, self._store, manifest)
        if text is None:
            await self._view.ensure_text(manifest)
            text = await asyncio.to_thread(load_text_model, self._store, manifest)
        if text is None:
            raise Internal(
                f"the tokenizer of manifest {manifest[:12]} is not in the store after it was fetched"
            )
        return text

    async def _prompt_ids(
        self, text: TextModel, request: generate_pb2.GenerateRequest, plan: Plan
    ) -> list[int]:
        kind = request.WhichOneof("input")
        if kind == "prompt_ids":
            return _checked_ids(request.prompt_ids.ids, "prompt_ids", request.model, text, plan)
        if kind == "resume":
            resume = request.resume
            if resume.manifest != plan.manifest:
                raise Conflict(
                    f"{request.model} is another model now than the one that this answer was begun with; ask again"
                )
            ids = _checked_ids(resume.prompt_ids, "resume", request.model, text, plan)
            _checked_ids(resume.output_ids, "resume", request.model, text, plan)
            return ids
        if kind == "prompt":
            return await self._encode(text.encode, request.prompt, plan.context)
        if not text.chat_template:
            raise InvalidRequest(
                f"{request.model} has no chat template: it is no chat model, or its files lack one; send a "
                "plain prompt (run --raw, /v1/completions)",
                field="messages",
            )
        messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
        rendered = await self._renderer.render(text.chat_template, messages, text.special_tokens)
        return await self._encode(text.encode_rendered, rendered, plan.context)

    async def _encode(self, encode: Callable[[str, int], list[int]], text: str, context: int) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._encoders, encode, text, context)

    # -- what drivers say -----------------------------------------------------------------------
    def _on_news(self, link: DriverLink, news: generate_pb2.News) -> None:
        running = self._table.get(news.request)
        if running is None or running.link is not link or news.attempt != running.log.attempt:
            return  # it has ended here, or moved on to another attempt
        if news.started:
            running.state = "running"
        if news.tokens:
            try:
                running.take(news)
            except P2PShardError as error:
                self._fail(running, error)
            except Exception as error:  # of this request alone: the stream carries others too
                log.exception("tokens of request %s", running.id)
                self._fail(running, Internal(f"its text could not be made: {type(error).__name__}: {error}"))
        end = news.WhichOneof("end")
        if end == "failed":
            failure = error_from_proto(news.failed)
            if isinstance(failure, Conflict):  # its worker ends, or another epoch takes its place
                failure = link.stage_lost(f"serves this epoch no longer ({failure.message})")
            self._lost(running, failure)
        elif end == "finished" and news.finished in _DRIVER_REASONS:
            running.end(news.finished)
        elif end == "finished":
            running.fail(
                ProtocolError(f"the driver ended the request for an unknown reason: {news.finished!r}")
            )
        elif running.log.outcome is not None and running.log.outcome.stop_string:
            self._tell_cancel(running)  # only we can see stop strings; a driver knows EOS and max_tokens

    def _on_lost(self, link: DriverLink, error: P2PShardError) -> None:
        served = [running for running in self._table if running.link is link]
        if served:
            log.warning("lost the driver of %s at %s: %s", link.plan.model, link.target, error)
        else:  # mostly a model that was taken off the cluster
            log.info("the stream to the driver of %s ended", link.plan.model)
        for running in served:
            self._lost(running, error)

    # -- ends -----------------------------------------------------------------------------------
    def _end(self, running: Running, reason: str) -> bool:
        """Record, then tell the driver."""
        ended = running.end(reason)
        if ended:
            self._tell_cancel(running)
        return ended

    def _too_late(self, running: Running) -> None:
        """The deadline has passed. A request that waits for lost layers fails with that reason."""
        if running.trouble is not None and running.deployment is not None:
            running.fail(self._given_up(running))
        else:
            self._end(running, "deadline")

    def _fail(self, running: Running, error: P2PShardError) -> None:
        if running.fail(error):
            self._tell_cancel(running)

    @staticmethod
    def _tell_cancel(running: Running) -> None:
        if running.link is not None:
            cancel = generate_pb2.CancelRequest(request=running.id, attempt=running.log.attempt)
            running.link.send(generate_pb2.DriverCommand(cancel=cancel))

    async def _watch(self) -> None:
        """Keep ending what has to end without anybody's message."""
        rounds = Rounds("the gateway's watch", log)
        while True:
            await asyncio.sleep(_WATCH_S)
            with rounds.one():
                self._drop_unread()
                self._drivers.check(lambda link: any(r.link is link for r in self._table))

    def _drop_unread(self) -> None:
        """Requests whose client has read nothing for too long."""
        now = time.monotonic()
        for running in self._table:
            if running.unread_since is not None and now - running.unread_since > self._limits.unread_s:
                error = Overloaded(
                    f"the client has read nothing for {self._limits.unread_s:g} s; the request was cancelled"
                )
                self._fail(running, error)
                self._table.remove(running)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _sampling(request: generate_pb2.GenerateRequest) -> SamplingParams:
    """With a seed: the client's, else one drawn here."""
    message = generate_pb2.Sampling()
    message.CopyFrom(request.sampling)
    if not request.has_seed:
        message.seed = secrets.randbits(63)
    return SamplingParams.from_proto(message)


def _room(prompt_tokens: int, plan: Plan) -> int:
    """Tokens that are left for the answer. Raises `ContextExceeded` when there is none."""
    if prompt_tokens >= plan.context:
        raise ContextExceeded(
            f"the prompt has {prompt_tokens} tokens and the context of {plan.model} has {plan.context}, which "
            "must also hold the answer; shorten the prompt or deploy with a larger --context",
            prompt_tokens=prompt_tokens,
            context=plan.context,
        )
    return plan.context - prompt_tokens


def _checked_ids(ids: Sequence[int], field: str, model: str, text: TextModel, plan: Plan) -> list[int]:
    """Token ids from a client. Raises `ContextExceeded` before they are copied, `InvalidRequest` for one that is none."""
    _room(len(ids), plan)
    if ids and max(ids) >= text.vocab_size:
        raise InvalidRequest(
            f"{field} has {max(ids)}; the vocabulary of {model} ends at {text.vocab_size - 1}", field=field
        )
    return list(ids)


def _check(request: generate_pb2.GenerateRequest) -> None:
    check_draft(request.draft)
    if not request.model:
        raise InvalidRequest("the request names no model", field="model")
    if request.WhichOneof("input") is None:
        raise InvalidRequest("the request has no prompt, prompt_ids or chat", field="prompt")
    if len(request.chat.messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"the chat has {len(request.chat.messages)} messages; at most {MAX_MESSAGES} are taken",
            field="messages",
        )
    if len(request.stop) > _MAX_STOPS:
        raise InvalidRequest(
            f"{len(request.stop)} stop strings; at most {_MAX_STOPS} are taken", field="stop"
        )
    for stop in request.stop:
        if not 1 <= len(stop) <= _MAX_STOP_CHARS:
            raise InvalidRequest(
                f"a stop string has {len(stop)} characters; 1 to {_MAX_STOP_CHARS} are taken", field="stop"
            )
    if not 0 <= request.deadline_s < float("inf"):
        raise InvalidRequest(
            f"deadline_s is {request.deadline_s}; it must be 0 (none) or more seconds", field="deadline_s"
        )


async def _unless_ended(running: Running, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, unless the request is cancelled or its deadline passes first."""
    task, ended = asyncio.create_task(work), asyncio.create_task(running.ended.wait())
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            outcome = running.log.outcome
            if outcome is not None and outcome.error is not None:
                raise outcome.error
            if outcome is not None and outcome.reason == "deadline":
                raise DeadlineExceeded("the deadline passed before the first token")
            raise Cancelled("the request was cancelled before its first token")
        return task.result()
    finally:
        task.cancel()
        ended.cancel()
        await asyncio.gather(task, ended, return_exceptions=True)
