"""Starts stage workers, watches them and ends them; the daemon outlives whatever they do.

One process per deployment. A worker's control channel is an inherited socket pair: when the daemon is gone
it closes, and the worker ends. A worker with its libraries already loaded is kept warm where the budget
allows, for importing them takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pshard.errors import Conflict, DoesNotFit, Internal, NotReady, P2PShardError, from_wire
from p2pshard.version import __version__

from . import platform
from .json_files import read_json, write_json
from .rounds import Rounds
from .worker.protocol import ControlChannel, epoch_of

__all__ = ["Supervisor", "Worker", "exit_reason", "same_weights"]

START_S = 90.0
PROBE_S = 60.0
LOAD_SILENCE_S = 180.0
"""A load that reports nothing for so long is stuck."""
HANGS_S = 8.0
"""A loaded worker answers at once, whatever it computes; one that does not for so long is ended. A slow processor is not
the reason: the others wait for their steps too, and know better how long those take."""
STOPPED_S = 1.0
"""The same for a process that the system has stopped."""
FREE_S = 2.0
"""A loaded worker that is to take up another stage, and does not begin for so long, hangs at what it was doing."""
STOP_S = 3.0
WATCH_S = 0.25
STATS_S = 0.5
MAX_RESPAWNS = 5
"""Warm workers that may die one after another before we stop trying to keep one."""

_log = logging.getLogger("p2pshard.supervisor")

Event = dict[str, Any]


def same_weights(a: Event, b: Event) -> bool:
    """Whether two plans, as JSON, are of one model in one dtype: what is in memory for one serves the other."""
    return all(a.get(what) == b.get(what) for what in ("manifest", "dtype"))


def _stuck() -> NotReady:
    return NotReady(
        f"loading reported nothing for {LOAD_SILENCE_S:.0f} s", state="loading", reason="stuck while loading"
    )


def exit_reason(code: int) -> str:
    """A worker's exit status in words."""
    if code in (137, -signal.SIGKILL):
        return "killed (signal 9), probably out of memory"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"died of {name}"
    return f"exited with code {code}"


@dataclass(frozen=True)
class Coming:
    """A stage that a worker has loaded beside the one it serves."""

    plan: Event
    stage: int
    booked_bytes: int
    budget_bytes: int
    alone: tuple[int, int]
    """What was booked, and the budget, for the stage that it serves."""
    event: Event
    """Its ``loaded``."""


@dataclass(eq=False)
class Worker:
    """One worker process."""

    process: asyncio.subprocess.Process
    channel: ControlChannel
    key: str = ""
    """The deployment it holds; empty while it is warm."""
    stage: int = 0
    booked_bytes: int = 0
    """What the plan counts with."""
    budget_bytes: int = 0
    """Above this its peak memory ends it; 0: not limited yet."""
    base_bytes: int = 0
    """Peak memory after its imports."""
    over_budget: str = ""
    """Why it was ended, when that was for its memory."""
    stuck: str = ""
    """Why it was ended, when that was because it did not answer."""
    stopping: bool = False
    started: asyncio.Future[Event] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    answer: asyncio.Future[Event] | None = None
    """Of the probe or load that is under way."""
    asked: list[Any] | None = None
    """The epoch of the load that is under way."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """It has begun with what it was asked for, has answered or is gone."""
    progress: Callable[[str, int, int], None] | None = None
    last_word: float = 0.0
    """When it last said anything; monotonic."""
    stats: Event = field(default_factory=dict)
    """Its latest ``stats`` event."""
    loaded: Event = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    """The plan (JSON) of whose stage number `stage` it has loaded, or is loading."""
    coming: Coming | None = None
    """What is to follow the stage that it serves."""
    settled: tuple[int, int] | None = None
    """What is booked, and the budget, once it has let go of the stage that it served before."""
    exit: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def peak_bytes(self) -> int:
        """VmHWM as the system tells, else as the worker last said."""
        return platform.peak_bytes(self.pid) or int(
            self.stats.get("peak_bytes", 0) or self.loaded.get("peak_bytes", 0)
        )

    def send(self, message: Event) -> None:
        """Queue a message; a worker that is gone is noticed by its reader."""
        self.channel.send(message)


class Supervisor:
    """All workers of this node.

    ``on_event(key, event)`` is called for what a loaded worker says (``ready``, ``not_ready``, ``edge_lost``,
    ``fatal``) and, last, for its end that was not asked for: ``{ev: "exit", code, reason}``.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        host: str,
        ports: tuple[int, int],
        node: str,
        device: str = "auto",
        warm: bool = True,
        budget: Callable[[], int | None] = lambda: None,
        on_event: Callable[[str, Event], None],
        argv: list[str] | None = None,
    ) -> None:
        self._probe_path = data_dir / "probe.json"
        self._host, self._ports, self._node, self._device = host, ports, node, device
        self._keep_warm, self._budget, self._on_event = warm, budget, on_event
        self._argv = argv or [sys.executable, "-m", "p2pshard_node.worker"]
        self._workers: set[Worker] = set()
        self._warm: Worker | None = None
        self._warming: asyncio.Task[None] | None = None
        self._respawns = 0
        self._rehearsed: tuple[str, str] | None = None
        """Dtype and device that warm workers are ready for."""
        self._watcher: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    # -- life
    def start(self) -> None:
        self._watcher = asyncio.create_task(self._watch(), name="watch workers")
        self.warm_up()

    async def close(self) -> None:
        """End every worker."""
        self._closed = True
        for task in (self._watcher, self._warming):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(*(self._end(w) for w in list(self._workers)))

    # -- views
    @property
    def local_host(self) -> str:
        """Host at which this machine reaches its own workers."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self._host, self._host)

    def worker(self, key: str) -> Worker | None:
        """The live worker of a deployment."""
        return next((w for w in self._workers if w.key == key and not w.stopping), None)

    def held(self) -> set[str]:
        """Deployments that have a live worker."""
        return {w.key for w in self._workers if w.key and not w.stopping}

    def workers(self) -> list[Worker]:
        """All live workers, the warm one included."""
        return list(self._workers)

    @property
    def base_bytes(self) -> int:
        """Peak memory of a worker after its imports: the latest measured, else of an earlier run, else 0."""
        known = [w.base_bytes for w in self._workers if w.base_bytes]
        if known:
            return max(known)
        cached = self._cached()
        return int(cached.get("base_bytes", 0)) if cached else 0

    def used_bytes(self, *, without: str = "") -> int:
        """What the plans of loaded workers count with, but for one deployment's."""
        return sum(w.booked_bytes for w in self._workers if w.key and w.key != without and not w.stopping)

    # -- processes
    def _environment(self) -> dict[str, str]:
        # torch makes its folder when it is imported, by default in the system's temporary one;
        # kernels compiled by numba may be shared by telling it a folder
        return {
            "NUMBA_CACHE_DIR": str(self._probe_path.parent / "kernels"),
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(self._probe_path.parent / "torch"),
        }

    async def _spawn(self) -> Worker:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                "--control-fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=self._environment(),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = Worker(process, ControlChannel(reader, writer), last_word=time.monotonic())
        self._workers.add(worker)
        worker.exit = asyncio.create_task(self._listen(worker), name=f"worker {process.pid}")
        try:
            async with asyncio.timeout(START_S):
                event = await asyncio.shield(worker.started)
        except TimeoutError:
            await self._end(worker)
            raise NotReady(
                f"a worker did not start within {START_S:.0f} s", state="loading", reason="worker start"
            ) from None
        except BaseException:
            await self._end(worker)
            raise
        worker.base_bytes = int(event.get("base_bytes", 0))
        return worker

    async def _listen(self, worker: Worker) -> int:
        """Take what the worker says until it ends; then report the end."""
        try:
            while (event := await worker.channel.read()) is not None:
                worker.last_word = time.monotonic()
                self._heard(worker, event)
        except (P2PShardError, ValueError, TypeError, KeyError) as error:
            _log.error("worker sends what is no event pid=%s error=%r", worker.pid, error)
        try:
            async with asyncio.timeout(STOP_S):
                code = await worker.process.wait()
        except TimeoutError:
            platform.kill_hard(worker.pid)
            code = await worker.process.wait()
        self._gone(worker, code)
        return code

    def _heard(self, worker: Worker, event: Event) -> None:
        match event["ev"]:
            case "started":
                if not worker.started.done():
                    worker.started.set_result(event)
            case "progress":
                worker.begun.set()
                if worker.progress is not None:
                    worker.progress(str(event["phase"]), int(event["done"]), int(event["total"]))
            case "probed" | "loaded" | "refused":
                worker.begun.set()
                if event.get("epoch") is not None and list(event["epoch"]) != worker.asked:
                    return  # of a load that nobody waits for any more
                if worker.answer is not None and not worker.answer.done():
                    worker.answer.set_result(event)
                elif event["ev"] == "refused" and worker.key and not worker.stopping:
                    # Of an activation, which has no answer of its own.
                    reason = from_wire(event.get("error") or {}).message
                    self._on_event(worker.key, {"ev": "not_ready", "reason": reason})
            case "stats":
                worker.stats = event
            case "activated":
                self._changed_over(worker, event)
            case "parted":
                self._parted(worker)
            case _:
                if worker.key and not worker.stopping:
                    self._on_event(worker.key, event)

    def _changed_over(self, worker: Worker, event: Event) -> None:
        """A worker serves the stage that it had loaded beside the other."""
        coming = worker.coming
        if coming is None or list(event["epoch"]) != epoch_of({"plan": coming.plan}):
            return
        worker.plan, worker.stage, worker.loaded = coming.plan, coming.stage, coming.event
        worker.coming, worker.settled = None, (coming.booked_bytes, coming.budget_bytes)

    def _parted(self, worker: Worker) -> None:
        """A worker has let go of the stage that it served before."""
        if worker.settled is not None:
            worker.booked_bytes, worker.budget_bytes = worker.settled
            worker.settled = None
            self.warm_up()

    def _gone(self, worker: Worker, code: int) -> None:
        self._workers.discard(worker)
        worker.begun.set()
        worker.channel.close()
        reason = worker.over_budget or worker.stuck or exit_reason(code)
        failure = Internal(f"the worker (pid {worker.pid}) {reason}", code=code)
        for waiting in (worker.started, worker.answer):
            if waiting is not None and not waiting.done():
                waiting.set_exception(DoesNotFit(worker.over_budget) if worker.over_budget else failure)
                waiting.exception()  # seen: nobody may be waiting any more
        if self._warm is worker:
            self._warm = None
            if not worker.stopping and self._respawns < MAX_RESPAWNS:
                self._respawns += 1
                _log.warning("warm worker %s pid=%s", reason, worker.pid)
                self.warm_up()
        if not worker.stopping and worker.key:
            _log.error("worker %s pid=%s deployment=%s", reason, worker.pid, worker.key)
            self._on_event(worker.key, {"ev": "exit", "code": code, "reason": reason, "pid": worker.pid})

    async def _end(self, worker: Worker) -> None:
        """Ask, then kill; returns when the process is gone and its memory is back."""
        worker.stopping = True
        if worker.exit is None or worker.exit.done():
            return
        with contextlib.suppress(ConnectionError, RuntimeError):
            worker.send({"op": "stop"})
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.shield(worker.exit)
        except TimeoutError:
            platform.kill_hard(worker.pid)
            await asyncio.shield(worker.exit)

    # -- the warm worker
    def warm_up(self) -> None:
        """Start a warm worker in the background, if one is wanted, missing, and fits beside what is loaded."""
        busy = self._warming is not None and not self._warming.done()
        if self._closed or not self._keep_warm or self._warm is not None or busy:
            return
        budget = self._budget()
        if budget is not None and self._workers and self.used_bytes() + self.base_bytes * 5 // 4 > budget:
            return
        self._warming = asyncio.create_task(self._warm_one(), name="warm worker")

    async def _warm_one(self) -> None:
        try:
            self._warm = await self._spawn()
            self._respawns = 0
            self._rehearse()
        except (P2PShardError, OSError) as error:
            _log.error("no warm worker: %s", error)

    def rehearse(self, dtype: str, device: str) -> None:
        """Have the warm worker, and those after it, ready for loads in this dtype; its kernels are on the disk."""
        if self._rehearsed != (dtype, device):
            self._rehearsed = dtype, device
            self._rehearse()

    def _rehearse(self) -> None:
        if self._rehearsed is not None and self._warm is not None:
            dtype, device = self._rehearsed
            self._warm.send({"op": "rehearse", "dtype": dtype, "device": device})

    async def _take(self) -> Worker:
        """A started worker for a load: the warm one, the one being warmed, or a new one."""
        if self._warming is not None and not self._warming.done():
            await asyncio.shield(self._warming)
        worker, self._warm = self._warm, None
        if worker is not None and worker in self._workers:
            return worker
        return await self._spawn()

    # -- probe
    def _cached(self) -> Event | None:
        cached = read_json(self._probe_path)
        key = [__version__, self._device, os.cpu_count()]
        return cached if isinstance(cached, dict) and cached.get("key") == key else None

    async def probe(self) -> Event:
        """``{devices: [...], base_bytes}``: what the worker measures of this machine, once and then from the disk."""
        cached = self._cached()
        if cached is not None:
            return cached
        async with self._lock:
            worker = await self._take()
            try:
                event = await self._ask(worker, {"op": "probe"}, PROBE_S)
            except TimeoutError:
                await self._end(worker)
                raise NotReady(
                    f"the worker measured nothing within {PROBE_S:.0f} s", state="loading", reason="probe"
                ) from None
            if self._keep_warm and worker in self._workers:
                self._warm = worker
            else:
                await self._end(worker)
        result = {
            "key": [__version__, self._device, os.cpu_count()],
            "devices": event.get("devices", []),
            "base_bytes": worker.base_bytes,
        }
        await asyncio.to_thread(write_json, self._probe_path, result)
        return result

    async def _ask(
        self, worker: Worker, message: Event, silence_s: float, begin_s: float | None = None
    ) -> Event:
        """Send and await the answer. Raises `TimeoutError` after so much silence (at first, ``begin_s``), or what the
        worker refused with."""
        worker.answer = asyncio.get_running_loop().create_future()
        worker.asked = epoch_of(message)
        worker.last_word = time.monotonic()
        worker.begun.clear()
        worker.send(message)
        if begin_s is not None:
            async with asyncio.timeout(begin_s):
                await worker.begun.wait()
        while True:
            done, _ = await asyncio.wait([worker.answer], timeout=1.0)
            if done:
                event = worker.answer.result()
                if event["ev"] == "refused":
                    raise from_wire(event.get("error") or {})
                return event
            if time.monotonic() - worker.last_word > silence_s:
                raise TimeoutError

    async def compile(self, layouts: list[str]) -> None:
        """Have the kernels for quantised models on disk, those of these layouts of grouped weights among them, before a
        stage needs them; at rest, and where the memory for it is free."""
        budget = self._budget()
        if budget is not None and self.used_bytes() + self.base_bytes * 2 > budget:
            return
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "p2pshard_node.engine.fused.prepare",
            "--ahead",
            *layouts,
            stdin=asyncio.subprocess.DEVNULL,
            env=self._environment(),
        )
        try:
            if code := await process.wait():
                _log.warning("kernels were not compiled ahead: %s", exit_reason(code))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    # -- deployments
    async def load(
        self,
        key: str,
        *,
        plan: dict[str, Any],
        stage: int,
        source: Path,
        booked_bytes: int,
        budget_bytes: int,
        progress: Callable[[str, int, int], None],
        before: Event | None = None,
    ) -> tuple[Worker, Event]:
        """Load a stage, in the worker that has this model in this dtype already, if there is one, so that only what is not
        in its memory is read. Raises what the worker refused with, `DoesNotFit` when it outgrew its budget, `NotReady` when
        stuck. ``before``: the epoch whose sequences are to be taken over.
        """
        worker = self.worker(key)
        if worker is not None and not (worker.loaded and same_weights(worker.plan, plan)):
            await self.stop(key)
            worker = None
        message = self._message(key, plan, stage, source, before, beside=False)

        def book(worker: Worker) -> None:
            worker.key, worker.plan, worker.stage, worker.progress = key, plan, stage, progress
            worker.coming = worker.settled = None
            worker.booked_bytes = booked_bytes
            # Its peak may be of the stage before.
            worker.budget_bytes = max(worker.budget_bytes, budget_bytes)

        if worker is not None:
            book(worker)
            try:
                event = await self._load(worker, message, FREE_S)
                worker.budget_bytes = budget_bytes
                return worker, event
            except (NotReady, Conflict, Internal) as error:
                _log.warning(
                    "worker pid=%s does not take up its next stage, another one does: %s", worker.pid, error
                )
        async with self._lock:
            worker = await self._take()
            book(worker)
        return worker, await self._load(worker, message, None)

    def _message(
        self, key: str, plan: Event, stage: int, source: Path, before: Event | None, *, beside: bool
    ) -> Event:
        return {
            "op": "load",
            "deployment": key,
            "plan": plan,
            "stage": stage,
            "source": str(source),
            "host": self._host,
            "ports": list(self._ports),
            "threads": None,
            "node": self._node,
            "next": None,
            "beside": beside,
            "before": before,
        }

    async def _load(self, worker: Worker, message: Event, begin_s: float | None) -> Event:
        """Its ``loaded`` event. A worker that does not come so far, or does not begin in time, is ended."""
        try:
            event = await self._ask(worker, message, LOAD_SILENCE_S, begin_s)
        except TimeoutError:
            if begin_s is not None:
                platform.kill_hard(
                    worker.pid
                )  # it hangs at its stage before, and would not hear that it is to stop
            await self._end(worker)
            raise _stuck() from None
        except BaseException:
            await self._end(worker)
            self.warm_up()
            raise
        worker.loaded = event
        worker.progress = None
        self.warm_up()
        return event

    async def load_beside(
        self,
        key: str,
        *,
        plan: dict[str, Any],
        stage: int,
        source: Path,
        booked_bytes: int,
        both_bytes: int,
        budget_bytes: int,
        progress: Callable[[str, int, int], None],
        before: Event | None = None,
    ) -> tuple[Worker, Event]:
        """Load a stage in a worker that goes on serving the one it has, whatever comes of this, until `activate` names the
        new one or `discard` gives it up. ``both_bytes`` are booked until then. Raises `Conflict` where one worker cannot hold
        the two, and as `load`.
        """
        worker = self.worker(key)
        if worker is None or not worker.loaded or not same_weights(worker.plan, plan):
            raise Conflict("what is served here is in another dtype: both cannot be held at once")
        message = self._message(key, plan, stage, source, before, beside=True)
        # With this load it lets go of whatever it served before.
        alone = worker.settled or (worker.booked_bytes, worker.budget_bytes)
        worker.settled = None
        worker.booked_bytes = max(alone[0], both_bytes)
        worker.budget_bytes = max(worker.budget_bytes, budget_bytes)
        worker.progress = progress
        try:
            event = await self._ask(worker, message, LOAD_SILENCE_S)
        except BaseException as error:
            worker.booked_bytes, worker.budget_bytes = alone
            if worker in self._workers:
                worker.send({"op": "discard"})
            if isinstance(error, TimeoutError):
                raise _stuck() from None
            raise
        finally:
            worker.progress = None
        worker.coming = Coming(plan, stage, booked_bytes, budget_bytes, alone, event)
        return worker, event

    def discard(self, key: str) -> None:
        """Let go of what a worker has loaded beside the stage that it serves, if there is such."""
        worker = self.worker(key)
        if worker is not None and worker.coming is not None:
            worker.booked_bytes, worker.budget_bytes = worker.coming.alone
            worker.coming = None
            worker.send({"op": "discard"})

    def activate(self, key: str, message: Event) -> None:
        """Tell the worker of a deployment its neighbours. Raises `NotReady` when there is none."""
        worker = self.worker(key)
        if worker is None:
            raise NotReady("its worker is gone", state="broken", reason="its worker is gone")
        worker.send({"op": "activate", **message})

    @staticmethod
    def _hangs(worker: Worker, now: float) -> bool:
        """Whether a loaded worker, which is asked for its counts all the time, has not answered for too long."""
        silent = now - worker.last_word
        return silent > HANGS_S or (silent > STOPPED_S and platform.is_stopped(worker.pid))

    async def stop(self, key: str) -> None:
        """End the worker of a deployment, if it has one, and have its memory back."""
        await asyncio.gather(*(self._end(w) for w in list(self._workers) if w.key == key))
        self.warm_up()

    # -- memory
    async def _watch(self) -> None:
        """Ask loaded workers for their counts, and end one whose peak memory is above its budget."""
        asked = looked = time.monotonic()
        rounds = Rounds("watch workers", _log)
        while True:
            with rounds.one():
                now = time.monotonic()
                if now - looked > STOPPED_S:
                    # This process stood still: who was silent meanwhile nobody knows.
                    for worker in self._workers:
                        worker.last_word = now
                looked = now
                ask = now - asked >= STATS_S
                if ask:
                    asked = now
                for worker in list(self._workers):
                    if not worker.key or worker.stopping:
                        continue
                    peak = platform.peak_bytes(worker.pid) or 0
                    if worker.budget_bytes and peak > worker.budget_bytes and not worker.over_budget:
                        worker.over_budget = f"was ended: it used {peak:,} bytes, above its budget of {worker.budget_bytes:,} bytes"
                        platform.kill_hard(worker.pid)
                    elif worker.loaded and self._hangs(worker, now):
                        worker.stuck = f"was ended: it had said nothing for {now - worker.last_word:.1f} s"
                        platform.kill_hard(worker.pid)
                    elif ask and worker.loaded:
                        worker.send({"op": "stats"})
            await asyncio.sleep(WATCH_S)
