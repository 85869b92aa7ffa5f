"""Gateway events to OpenAI's response objects: whole, or in chunks. One class for each of the two formats."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from p2pshard.errors import Cancelled, DeadlineExceeded
from p2pshard.transport.generated import generate_pb2

from ..gateway.tokenizer import TextModel

__all__ = ["Answer", "ChatAnswer", "CompletionAnswer"]

Events = AsyncGenerator[generate_pb2.GenerateEvent, None]


class Answer(ABC):
    """The answer to one request, made of its events in order."""

    whole: ClassVar[str]
    """``object`` of the whole answer."""
    part: ClassVar[str]
    """``object`` of a chunk."""
    prefix: ClassVar[str]

    def __init__(
        self,
        record: generate_pb2.ResumeRecord,
        model: str,
        text: TextModel,
        *,
        logprobs: int,
        include_usage: bool,
    ) -> None:
        """`logprobs`: -1 none, else how many alternatives are shown for each token."""
        self._base = {"id": f"{self.prefix}-{record.request}", "created": int(time.time()), "model": model}
        self._fingerprint = record.manifest[:16]
        self._text_model = text
        self._logprobs = logprobs
        self._include_usage = include_usage

    async def collect(self, events: Events) -> dict[str, Any]:
        """The whole answer. Raises what ended the request otherwise than by stop or length."""
        text: list[str] = []
        tokens: list[generate_pb2.Token] = []
        finish = generate_pb2.Finish()
        async with aclosing(events):
            async for event in events:
                if event.HasField("delta"):
                    text.append(event.delta.text)
                    tokens.extend(event.delta.tokens)
                elif event.HasField("finish"):
                    finish = event.finish
        reason = _reason(finish)
        choice = self._choice("".join(text), self._logprobs_of(tokens, 0), reason)
        return {**self._object(self.whole), "choices": [choice], "usage": _usage(finish)}

    async def chunks(self, events: Events) -> AsyncGenerator[dict[str, Any], None]:
        """One chunk for each delta, one with the finish reason, one with the usage when it was asked for."""
        if (first := self._first()) is not None:
            yield self._chunk(first)
        offset = 0
        async with aclosing(events):
            async for event in events:
                if event.HasField("delta"):
                    text = event.delta.text
                    logprobs = self._logprobs_of(event.delta.tokens, offset)
                    offset += len(text)
                    if text or logprobs is not None:
                        yield self._chunk(self._part(text, logprobs, None))
                elif event.HasField("finish"):
                    yield self._chunk(self._part("", None, _reason(event.finish)))
                    if self._include_usage:
                        yield {**self._object(self.part), "choices": [], "usage": _usage(event.finish)}

    def _object(self, kind: str) -> dict[str, Any]:
        return {**self._base, "object": kind, "system_fingerprint": self._fingerprint}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._include_usage else {}
        return {**self._object(self.part), "choices": [choice], **usage}

    def _logprobs_of(self, tokens: Sequence[generate_pb2.Token], offset: int) -> dict[str, Any] | None:
        """Special tokens are no text and are not listed."""
        if self._logprobs < 0:
            return None
        return self._format_logprobs([t for t in tokens if t.id not in self._text_model.special_ids], offset)

    def _token(self, token: int) -> tuple[str, list[int]]:
        data = self._text_model.token_bytes(token)
        return data.decode(errors="replace"), list(data)

    @abstractmethod
    def _first(self) -> dict[str, Any] | None:
        """The choice of the chunk that opens a stream."""

    @abstractmethod
    def _choice(self, text: str, logprobs: dict[str, Any] | None, reason: str) -> dict[str, Any]:
        """The choice of a whole answer."""

    @abstractmethod
    def _part(self, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        """The choice of a chunk."""

    @abstractmethod
    def _format_logprobs(self, tokens: Sequence[generate_pb2.Token], offset: int) -> dict[str, Any]:
        """`offset`: characters of the answer before these tokens."""


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    whole, part, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _first(self) -> dict[str, Any] | None:
        return {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def _choice(self, text: str, logprobs: dict[str, Any] | None, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _part(self, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        delta = {} if reason is not None else {"content": text}
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _format_logprobs(self, tokens: Sequence[generate_pb2.Token], offset: int) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._entry(t.id, t.logprob),
                    "top_logprobs": [self._entry(o.id, o.logprob) for o in t.top[: self._logprobs]],
                }
                for t in tokens
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._token(token)
        return {"token": text, "logprob": logprob, "bytes": data}


class CompletionAnswer(Answer):
    """/v1/completions."""

    whole, part, prefix = "text_completion", "text_completion", "cmpl"

    def _first(self) -> dict[str, Any] | None:
        return None

    def _choice(self, text: str, logprobs: dict[str, Any] | None, reason: str) -> dict[str, Any]:
        return self._part(text, logprobs, reason)

    def _part(self, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _format_logprobs(self, tokens: Sequence[generate_pb2.Token], offset: int) -> dict[str, Any]:
        pieces = [self._token(t.id)[0] for t in tokens]
        offsets = []
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece)
        return {
            "tokens": pieces,
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [
                {self._token(o.id)[0]: o.logprob for o in t.top[: self._logprobs]} for t in tokens
            ],
            "text_offset": offsets,
        }


def _reason(finish: generate_pb2.Finish) -> str:
    """OpenAI knows stop and length; the other ends are errors there."""
    if finish.reason == "cancelled":
        raise Cancelled("the request was cancelled")
    if finish.reason == "deadline":
        raise DeadlineExceeded("the request's deadline passed")
    return finish.reason


def _usage(finish: generate_pb2.Finish) -> dict[str, int]:
    return {
        "prompt_tokens": finish.prompt_tokens,
        "completion_tokens": finish.completion_tokens,
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
    }
