"""One request while it runs: its log, the text made of it, and what its client has not read yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from p2pshard.errors import Overloaded, P2PShardError
from p2pshard.transport.generated import control_pb2, generate_pb2

from .driver_link import DriverLink
from .drivers import PASSING
from .requests import Outcome, RequestLog
from .stop import StopMatcher
from .tokenizer import TextModel

__all__ = ["Running"]

MAX_FUTILE = 3
"""Drivers that may be lost one after the other while they worked on a request and before they gave a token of it."""


class Running:
    """State of a request between its driver and its client. Nothing here waits except the client's side."""

    def __init__(
        self, request_id: str, model: str, stops: Sequence[str], ignore_eos: bool, max_unread: int
    ) -> None:
        self.id = request_id
        self.model = model
        self.state = "waiting"
        """``waiting`` (deployment, prompt), ``queued`` (at the driver) or ``running``."""
        self.log = RequestLog(0)
        self.prompt_ids: list[int] = []
        self.eos_ids: tuple[int, ...] = ()
        self.link: DriverLink | None = None
        self.deployment: control_pb2.Deployment | None = None
        self.submit: generate_pb2.Submit | None = None
        """As it was last sent to a driver."""
        self.deadline_at = 0.0
        """The event loop's time; 0: no deadline."""
        self.trouble: P2PShardError | None = None
        """Why it has no driver just now."""
        self._given = 0
        """Tokens that the log had when the driver of this attempt was given it."""
        self._futile = 0
        self._before = 0
        """Tokens that an earlier gateway gave."""
        self.started = time.monotonic()
        self.unread_since: float | None = None
        """Monotonic time since when the client could have read something and has not."""
        self.ended = asyncio.Event()
        self._ignore_eos = ignore_eos
        self._stops = StopMatcher(stops)
        self._max_unread = max_unread
        self._text: list[str] = []
        self._tokens: list[generate_pb2.Token] = []
        self._read = 0  # tokens of the log that the client's side has taken
        self._wake = asyncio.Event()
        self._first_at = self._last_at = 0.0

    def prepare(self, text: TextModel, prompt_ids: list[int], max_tokens: int) -> None:
        """The prompt is known: the request can go to a driver."""
        self.prompt_ids = prompt_ids
        self.log.max_tokens = max_tokens
        self.eos_ids = () if self._ignore_eos else text.eos_ids
        self._detokeniser = text.detokeniser()

    def replay(self, ids: Sequence[int]) -> None:
        """Take up an answer of which the client has so many tokens: the log, and the state that follows from it.

        It has ended afterwards where the log says so.
        """
        for token in ids:
            if self.log.append(self.log.attempt, len(self.log.ids), (token,)):
                self._digest(token)
        self._text, self._tokens, self._read = [], [], len(self.log.ids)
        self._before = self._given = self._read

    # -- from driver to driver ------------------------------------------------------------------
    def handed_to(self, deployment: control_pb2.Deployment, link: DriverLink) -> None:
        """A driver has it now."""
        self.deployment, self.link, self.state, self.trouble = deployment, link, "queued", None
        self._given = len(self.log.ids)

    def may_go_on(self, error: P2PShardError) -> bool:
        """Whether another driver may do better than the one that ended with `error`.

        Not when the error is the request's own, and not when several drivers one after the other have begun on it and were
        lost before they gave a token: it may be what they were lost by.
        """
        if self.submit is None or not isinstance(error, (*PASSING, Overloaded)):
            return False
        if isinstance(error, Overloaded) and self.log.attempt == 1:
            return False  # nothing has been promised yet
        return self._futile + self._in_vain < MAX_FUTILE

    @property
    def _in_vain(self) -> bool:
        return self.state == "running" and len(self.log.ids) == self._given

    def lost(self, error: P2PShardError) -> None:
        """Its driver is gone; it waits for the next one."""
        if self._in_vain:
            self._futile += 1
        elif self.state == "running":
            self._futile = 0
        self.link, self.state, self.trouble = None, "waiting", error

    def time_left(self) -> float:
        """Seconds until the deadline, as `Submit.deadline_s` has them; 0: none."""
        return max(0.001, self.deadline_at - asyncio.get_running_loop().time()) if self.deadline_at else 0.0

    # -- the driver's side ----------------------------------------------------------------------
    def take(self, message: generate_pb2.News) -> None:
        """Append what continues the log; ends it at EOS, a stop string or max_tokens.

        Raises `ProtocolError` when tokens were lost on the way, `Overloaded` when the client does not read.
        """
        for offset, token in enumerate(message.tokens):
            if not self.log.append(message.attempt, message.index + offset, (token.id,)):
                continue
            self._last_at = time.monotonic()
            self._first_at = self._first_at or self._last_at
            self.state = "running"
            self._tokens.append(token)
            self._digest(token.id)
        if self._tokens:
            self._notify()
        if len(self._tokens) > self._max_unread and self.log.outcome is None:
            raise Overloaded(
                f"the client has left {len(self._tokens)} tokens unread; the request was cancelled",
                retry_after_s=1,
            )

    def _digest(self, token: int) -> None:
        """Make text of the token that the log has just taken, and end where that ends it."""
        eos = token in self.eos_ids
        if not eos:
            self._text.append(self._stops.push(self._detokeniser.push((token,))))
        if eos or self._stops.matched is not None:
            self.end("stop")
        elif len(self.log.ids) == self.log.max_tokens:
            self.end("length")

    def end(self, reason: str) -> bool:
        """Record a normal end and let go of the text that was held back; False when it had ended before."""
        if self.log.outcome is not None:
            return False
        if self.log.max_tokens:  # prepared: there may be text
            self._text.append(self._stops.push(self._detokeniser.finish()))
            self._text.append(self._stops.finish())
        if self._stops.matched is not None and reason in ("stop", "length"):
            reason = "stop"
        return self._end(Outcome(reason, self._stops.matched or "" if reason == "stop" else ""))

    def fail(self, error: P2PShardError) -> bool:
        """Record an end by `error`; False when it had ended before."""
        return self._end(Outcome("error", error=error))

    def _end(self, outcome: Outcome) -> bool:
        if not self.log.end(outcome):
            return False
        self.ended.set()
        self._notify()
        return True

    def _notify(self) -> None:
        if self.unread_since is None:
            self.unread_since = time.monotonic()
        self._wake.set()

    # -- the client's side ----------------------------------------------------------------------
    async def next_delta(self) -> generate_pb2.TextDelta | None:
        """All that came since the last call, in one message; None after the end."""
        await self._wake.wait()
        self.unread_since = None
        text, tokens, index = "".join(self._text), self._tokens, self._read
        self._text, self._tokens = [], []
        self._read += len(tokens)
        if self.log.outcome is None:
            self._wake.clear()
        if not text and not tokens:
            return None
        return generate_pb2.TextDelta(text=text, tokens=tokens, index=index)

    def finish(self) -> generate_pb2.Finish:
        """The last event; raises the error that ended the request."""
        outcome = self.log.outcome
        assert outcome is not None, "finish before the end"
        if outcome.error is not None:
            raise outcome.error
        count = len(self.log.ids)
        elapsed = self._last_at - self._first_at
        here = count - self._before
        return generate_pb2.Finish(
            reason=outcome.reason,
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=count,
            ttft_ms=(self._first_at - self.started) * 1000 if here else 0.0,
            tokens_per_second=(here - 1) / elapsed if elapsed > 0 else 0.0,
            stop_string=outcome.stop_string,
        )

    def to_json(self) -> dict[str, object]:
        """A row of ``ps --json``."""
        return {
            "id": self.id,
            "model": self.model,
            "state": self.state,
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": len(self.log.ids),
        }
