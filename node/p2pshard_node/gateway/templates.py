"""Chat templates: rendered as transformers does, in a child process that can be stopped.

A template comes with a model, and a model from anywhere. Jinja's sandbox keeps it from Python's objects but
not from looping for ever or doubling a string forty times, and a thread cannot be stopped. So one small
child process (this file run as a module; standard library and jinja2, about 20 MB) renders: it is killed
when a render exceeds its time, where the system can its memory is capped, and its answer is read only up to
a limit. It ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import lru_cache
from typing import IO, Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from p2pshard.errors import Internal, InvalidRequest

__all__ = ["TemplateRenderer", "render"]

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 16 << 20
_MAX_MEMORY_BYTES = 1 << 30
_LENGTH = struct.Struct(">I")
_MAX_REPLY_BYTES = 4 * MAX_OUTPUT_CHARS + 1024


# -- the rendering itself ----------------------------------------------------------------------------
class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own protocol)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Not jinja's own filter: that one escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def render(
    template: str,
    messages: Sequence[Mapping[str, str]],
    variables: Mapping[str, Any],
    add_generation_prompt: bool = True,
) -> str:
    """Render in this process, without limits of time: only for templates that are trusted, and for the child.

    Raises `InvalidRequest` with the template's own words when it refuses the messages or is broken.
    """
    try:
        text = _compile(template).render(
            messages=[dict(m) for m in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except (
        jinja2.exceptions.TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise InvalidRequest(
            f"the model's chat template refused these messages: {error}", field="messages"
        ) from error
    except (RecursionError, MemoryError) as error:
        raise InvalidRequest(
            f"the model's chat template needs too much memory ({type(error).__name__})"
        ) from error
    if len(text) > MAX_OUTPUT_CHARS:
        raise InvalidRequest(
            f"the chat template rendered {len(text)} characters; at most {MAX_OUTPUT_CHARS} are taken"
        )
    return text


# -- the child process -------------------------------------------------------------------------------
def _send(stream: IO[bytes], value: Any) -> None:
    data = json.dumps(value).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > _MAX_REPLY_BYTES:
        return None
    data = stream.read(size)
    return json.loads(data) if len(data) == size else None


def _child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's; we end with our input
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system can cap a process's memory
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    while (job := _receive(sys.stdin.buffer)) is not None:
        try:
            reply = {"text": render(**job)}
        except InvalidRequest as error:
            reply = {"error": error.message}
        _send(sys.stdout.buffer, reply)


class TemplateRenderer:
    """Renders untrusted templates in its child process, one at a time, each within `limit_s` seconds."""

    def __init__(self, limit_s: float = 5.0) -> None:
        """The limit covers starting the child, about 0.2 s, where the render has to."""
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="templates")

    def warm(self) -> None:
        """Start the child in the background, so that the first render need not wait for it."""
        self._thread.submit(self._started)

    async def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, str]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        """Raises `InvalidRequest` when the template refuses, is broken, or exceeds time or size."""
        if len(template) > MAX_TEMPLATE_CHARS:
            raise InvalidRequest(
                f"the chat template has {len(template)} characters; at most {MAX_TEMPLATE_CHARS} are taken"
            )
        job = {
            "template": template,
            "messages": [dict(m) for m in messages],
            "variables": dict(variables),
            "add_generation_prompt": add_generation_prompt,
        }
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._render, job)

    def close(self) -> None:
        """End the child and the thread. Idempotent."""
        self._stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _render(self, job: dict[str, Any]) -> str:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(self._limit_s, process.kill)
        timer.start()
        try:
            _send(process.stdin, job)
            reply = _receive(process.stdout)
        except OSError:  # the pipe broke: killed, or it ran out of memory
            reply = None
        finally:
            timer.cancel()
        if reply is None:
            code = process.wait(5) if process.poll() is None else process.returncode
            self._stop()
            raise InvalidRequest(
                f"the model's chat template was stopped: more than {self._limit_s:g} s or too much memory "
                f"(exit {code}); send a plain prompt instead (run --raw, /v1/completions)",
                field="messages",
            )
        if "error" in reply:
            raise InvalidRequest(reply["error"], field="messages")
        return str(reply["text"])

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                raise Internal(f"cannot start the process that renders chat templates: {error}") from error
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a flush to a process that is gone
                    pipe.close()
        process.wait()


if __name__ == "__main__":
    _child()
