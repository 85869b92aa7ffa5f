"""The request bodies of the OpenAI API that are served, and their translation to a `GenerateRequest`.

A field that is not known is refused by name, and so is one that is known but whose meaning is not
implemented: nothing that a client asked for is dropped in silence. A field whose value says what happens
anyway (``n: 1``, ``tools: []``, any null) is taken.

Beyond OpenAI's fields: ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``, ``speculation``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from p2pshard.errors import InvalidRequest
from p2pshard.speculation import MAX_DRAFT, draft_of
from p2pshard.transport.generated import generate_pb2

from ..gateway.gateway import MAX_MESSAGES
from .errors import from_validation, unsupported

__all__ = ["ChatBody", "CompletionBody", "parse_chat", "parse_completion"]

B = TypeVar("B", bound=BaseModel)

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
"""Known fields that are not implemented, with the values that change nothing."""
_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
"""Known fields that cannot change an answer here: labels, hints, a setting of tools."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def text(self) -> str:
        """The parts are joined as they stand."""
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)


class _Common(_Strict):
    model: str = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    ignore_eos: bool = False
    speculation: Literal["off", "adaptive"] | Annotated[int, Field(ge=1, le=MAX_DRAFT)] = "off"
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _request(self, logprobs: int, max_tokens: int | None) -> generate_pb2.GenerateRequest:
        """Temperature defaults to 1 as OpenAI's does (the gRPC service and the CLI default to greedy)."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is for stream: true only", field="stream_options")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return generate_pb2.GenerateRequest(
            model=self.model,
            sampling=generate_pb2.Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=self.top_k or 0,
                top_p=1.0 if self.top_p is None else self.top_p,
                min_p=self.min_p or 0.0,
                repetition_penalty=self.repetition_penalty or 1.0,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                seed=(self.seed or 0) % 2**64,
                logprobs=logprobs,
            ),
            has_seed=self.seed is not None,
            max_tokens=max_tokens or 0,
            stop=stops,
            ignore_eos=self.ignore_eos,
            draft=draft_of(self.speculation),
        )


class ChatBody(_Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    def to_request(self) -> generate_pb2.GenerateRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; "
                "send one of them",
                field="max_tokens",
            )
        request = self._request(
            (self.top_logprobs or 0) if self.logprobs else -1, self.max_completion_tokens or self.max_tokens
        )
        request.chat.SetInParent()
        for message in self.messages:
            role = "system" if message.role == "developer" else message.role  # its newer name
            request.chat.messages.add(role=role, content=message.text())
        return request


class CompletionBody(_Common):
    """POST /v1/completions. One prompt: text, or token ids."""

    prompt: Any
    """Text, token ids, or a list of one of these; checked by hand, for a list of a million may come."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def to_request(self) -> generate_pb2.GenerateRequest:
        prompt = self.prompt
        if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], str | list)):
            if len(prompt) != 1:
                raise unsupported("prompt", f"has {len(prompt)} prompts; send one a request")
            prompt = prompt[0]
        request = self._request(
            -1 if self.logprobs is None else self.logprobs, self.max_tokens or COMPLETION_MAX_TOKENS
        )
        if isinstance(prompt, str):
            request.prompt = prompt
        elif isinstance(prompt, list):
            if any(type(i) is not int or not 0 <= i < 2**32 for i in prompt):
                raise InvalidRequest(
                    "prompt has a token id that is no integer from 0 to 2^32-1", field="prompt"
                )
            request.prompt_ids.SetInParent()
            request.prompt_ids.ids.extend(prompt)
        else:
            raise InvalidRequest("prompt is neither text nor a list of token ids", field="prompt")
        return request


def parse_chat(body: Any) -> ChatBody:
    """Raises `InvalidRequest` naming the field."""
    body = _known(body)
    messages = body.get("messages")
    if not isinstance(messages, list):
        messages = []  # refused below
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"the chat has {len(messages)} messages; at most {MAX_MESSAGES} are taken", field="messages"
        )
    parts = 0
    for index, message in enumerate(messages):
        if isinstance(message, dict):
            content = message.get("content")
            parts += len(content) if isinstance(content, list) else 0
            if parts > MAX_MESSAGES:
                raise InvalidRequest(
                    f"the chat has {parts} content parts so far; at most {MAX_MESSAGES} are taken",
                    field=f"messages[{index}].content",
                )
            _check_message(message, index)
    return _validated(ChatBody, body)


def parse_completion(body: Any) -> CompletionBody:
    """Raises `InvalidRequest` naming the field."""
    return _validated(CompletionBody, _known(body))


def _validated(cls: type[B], body: dict[str, Any]) -> B:
    try:
        return cls.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from error


def _known(body: Any) -> dict[str, Any]:
    """The body without nulls, ignored fields and neutral values; refuses what is not implemented."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object", field="body")
    kept = {}
    for name, value in body.items():
        if value is None or name in _IGNORED:
            continue
        if name in _NEUTRAL:
            # 1 == True in Python; here they differ
            if not any(value == v and type(value) is type(v) for v in _NEUTRAL[name]):
                raise unsupported(name, f"is not supported by this server (value {str(value)[:80]!r})")
            continue
        kept[name] = value
    return kept


def _check_message(message: dict[str, Any], index: int) -> None:
    """Name what a message has that a text model cannot take."""
    where = f"messages[{index}]"
    if message.get("role") in ("tool", "function"):
        raise unsupported(f"{where}.role", "is of a tool; this server calls none")
    for name in ("tool_calls", "function_call", "tool_call_id", "audio", "refusal", "name"):
        if message.get(name) not in (None, []):
            raise unsupported(f"{where}.{name}", "is not supported by this server")
        message.pop(name, None)
    content = message.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise unsupported(
                f"{where}.content[{number}]", f"is of type {kind[:40]!r}; this server takes text only"
            )
