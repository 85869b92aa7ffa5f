"""A request is its log: the tokens given so far, and how it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from p2pshard.errors import Overloaded, P2PShardError, ProtocolError

__all__ = ["Outcome", "RequestLog", "RequestTable"]


@dataclass(frozen=True)
class Outcome:
    """How a request ended."""

    reason: str
    """``stop``, ``length``, ``cancelled``, ``deadline`` or ``error``."""
    stop_string: str = ""
    error: P2PShardError | None = None
    """Set with reason ``error``."""


class RequestLog:
    """Output ids of one request, in order, each taken once.

    A token is *given* when it stands here. Only the current attempt, at the index that equals the log's
    length, is taken; once ended nothing is, and the first reason stays, so a cancel that was recorded is
    never undone.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.attempt = 1
        self.ids: list[int] = []
        self.outcome: Outcome | None = None

    def append(self, attempt: int, index: int, ids: Sequence[int]) -> int:
        """Take the ids that continue the log; how many were taken.

        0 for another attempt, for tokens that stand here already and after the end. Raises `ProtocolError`
        when the current attempt skips an index: tokens were lost on the way.
        """
        if attempt != self.attempt or self.outcome is not None or index < len(self.ids):
            return 0
        if index > len(self.ids):
            raise ProtocolError(f"token {index} came where {len(self.ids)} was due (attempt {attempt})")
        taken = ids[: self.max_tokens - len(self.ids)]
        self.ids.extend(taken)
        return len(taken)

    def end(self, outcome: Outcome) -> bool:
        """Record the end; False when it had ended before."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        return True

    def next_attempt(self) -> int:
        """Fence the driver of the current attempt: whatever it still sends is not taken."""
        self.attempt += 1
        return self.attempt


class Logged(Protocol):
    id: str
    log: RequestLog


R = TypeVar("R", bound=Logged)


class RequestTable(Generic[R]):
    """Requests that run, at most `limit`, and the outcomes of the last ones that ended, at most `history`."""

    def __init__(self, limit: int, history: int = 256) -> None:
        self._limit = limit
        self._running: dict[str, R] = {}
        self._ended: deque[tuple[str, Outcome]] = deque(maxlen=history)

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._running.values()))

    def get(self, request_id: str) -> R | None:
        return self._running.get(request_id)

    def add(self, request: R) -> None:
        """Raises `Overloaded` at the limit."""
        if len(self._running) >= self._limit:
            raise Overloaded(
                f"this node already carries {self._limit} requests; send it to another node or try again "
                "shortly",
                retry_after_s=1,
            )
        self._running[request.id] = request

    def remove(self, request: R) -> None:
        if self._running.pop(request.id, None) is not None and request.log.outcome is not None:
            self._ended.append((request.id, request.log.outcome))

    def outcome(self, request_id: str) -> Outcome | None:
        """How one of the last requests ended."""
        return next((o for i, o in reversed(self._ended) if i == request_id), None)
