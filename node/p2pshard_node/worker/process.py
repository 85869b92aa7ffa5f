"""The worker process: obeys its daemon over the control channel, and ends when that closes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from p2pshard.addresses import host_port
from p2pshard.credentials import Credentials
from p2pshard.errors import Conflict, Internal, ModelCorrupt, NotReady, P2PShardError, ProtocolError
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.transport.frames import Limits
from p2pshard_node.engine.heap import returned_at_once
from p2pshard_node.engine.numerics import Golden
from p2pshard_node.engine.sampling import sample_rows
from p2pshard_node.engine.source import TensorSource
from p2pshard_node.engine.stage import StageModel
from p2pshard_node.platform import peak_bytes, reset_peak_bytes
from p2pshard_node.worker import probe
from p2pshard_node.worker.carry import GATHER_S, Before, Left, gather
from p2pshard_node.worker.data_port import DataPort
from p2pshard_node.worker.epoch import ActiveEpoch
from p2pshard_node.worker.executor import StageExecutor
from p2pshard_node.worker.protocol import ControlChannel, epoch_of

__all__ = ["WorkerProcess", "own_peak_bytes"]

KEEP_S = 6.0
"""So long a stage keeps what the epoch before left: a little longer than the others take it over."""

log = logging.getLogger(__name__)


def own_peak_bytes() -> int:
    """Peak resident memory of this process."""
    peak = peak_bytes(os.getpid())
    if peak is not None:
        return peak
    if os.name == "posix":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    import psutil

    return int(psutil.Process().memory_info().peak_wset)


@dataclass(frozen=True)
class _Loaded:
    deployment: str
    plan: Plan
    index: int
    model: StageModel
    limits: Limits
    window: int
    port: DataPort
    before: Before | None = None
    """The epoch whose sequences may be taken over."""

    def may_become(self, deployment: str, plan: Plan, index: int) -> bool:
        """Whether a stage of another plan can follow in this process."""
        return (
            self.deployment == deployment
            and (self.plan.manifest, self.plan.dtype) == (plan.manifest, plan.dtype)
            and self.plan.stages[self.index].ranks[0].device == plan.stages[index].ranks[0].device
            and self.plan.epoch < plan.epoch
        )

    def is_same(self, plan: Plan, index: int) -> bool:
        """Whether that stage is this one, in memory as it is."""
        return self.plan.extent(self.index) == plan.extent(index)


class WorkerProcess:
    """One stage at a time of one deployment, from the first ``load`` to the end of the process.

    A later ``load`` is of the next epoch. It keeps what both stages have in memory, and ends the one before: at once, or
    when it is itself activated, if it was to be loaded beside it.
    """

    def __init__(self, channel: ControlChannel, credentials: Credentials | None = None) -> None:
        self._channel, self._credentials = channel, credentials
        self._instance = secrets.token_hex(8)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._base_bytes = own_peak_bytes()
        self._side = ThreadPoolExecutor(1, thread_name_prefix="load")
        """For loads beside a stage that serves."""
        self._loaded: _Loaded | None = None
        self._coming: _Loaded | None = None
        """What was loaded beside it."""
        self._active: ActiveEpoch | None = None
        self._left: Left | None = None
        """What the epoch before leaves, for a while."""
        self._parting: asyncio.Task[None] | None = None
        self._ending = asyncio.Lock()
        self._golden: dict[tuple[str, str], Golden] = {}
        """What the golden model gave, by dtype and device."""

    async def run(self) -> None:
        """Until told to stop or the daemon is gone."""
        self._channel.send({"ev": "started", "pid": os.getpid(), "base_bytes": self._base_bytes})
        todo: asyncio.Queue[dict[str, Any]] = asyncio.Queue(64)
        work = asyncio.create_task(self._work(todo))
        try:
            # Read on while a model loads: a daemon that is gone, or says stop, ends the worker at once.
            while (message := await self._channel.read()) is not None and message.get("op") != "stop":
                if message.get("op") == "stats":
                    self._channel.send(self._stats())
                else:
                    todo.put_nowait(message)
        except (ProtocolError, asyncio.QueueFull) as error:
            fatal = (
                error
                if isinstance(error, ProtocolError)
                else ProtocolError("too many control messages at once")
            )
            self._channel.send({"ev": "fatal", "error": fatal.to_wire()})
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self._close()

    async def _work(self, todo: asyncio.Queue[dict[str, Any]]) -> None:
        while True:
            await self._obey(await todo.get())

    async def _obey(self, message: dict[str, Any]) -> None:
        match message.get("op"):
            case "probe":
                await self._answer(self._probe())
            case "load":
                await self._answer(self._load(message), epoch_of(message))
            case "discard":
                await self._discard()
            case "rehearse":
                await self._answer(self._rehearse(str(message["dtype"]), str(message["device"])))
            case "activate":
                await self._answer(self._activate(message))
            case other:
                self._refuse(ProtocolError(f"unknown control message {other!r}"))

    async def _probe(self) -> None:
        devices = await asyncio.get_running_loop().run_in_executor(self._thread, probe.measure)
        self._channel.send({"ev": "probed", "devices": devices})

    async def _rehearse(self, dtype: str, device: str) -> None:
        """Have in memory what a load in this dtype will need."""
        if (dtype, device) not in self._golden:
            torch.set_num_threads(_available_threads())
            loop = asyncio.get_running_loop()
            golden = await loop.run_in_executor(self._thread, StageModel.rehearse, dtype, device)
            self._golden[dtype, device] = golden

    async def _answer(self, work: Any, epoch: list[Any] | None = None) -> None:
        """`epoch`: of the load that is answered."""
        try:
            await work
        except P2PShardError as error:
            self._refuse(error, epoch)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            log.exception("control message")
            self._refuse(ProtocolError(f"malformed control message: {error!r}"), epoch)
        except Exception as error:  # torch's and the model's own code may raise anything
            log.exception("control message")
            self._refuse(Internal(f"{type(error).__name__}: {error}"), epoch)

    def _refuse(self, error: P2PShardError, epoch: list[Any] | None = None) -> None:
        self._channel.send({"ev": "refused", "error": error.to_wire(), "epoch": epoch})

    # -- load -----------------------------------------------------------------------------------
    async def _load(self, message: dict[str, Any]) -> None:
        plan = Plan.from_json(message["plan"])
        plan.check()
        index = int(message["stage"])
        stage = plan.stages[index]
        if message["node"] != stage.node:
            raise Conflict(f"stage {index} of the plan is node {stage.node}'s, this is {message['node']}")
        before = self._loaded
        if before is not None and not before.may_become(message["deployment"], plan, index):
            raise Conflict(f"this worker holds {before.deployment} already; start another one")
        beside = bool(message.get("beside")) and before is not None
        self._coming = self._left = None
        if not beside:
            await self._end_active()
            self._left = None
        torch.set_num_threads(int(message.get("threads") or _available_threads()))
        loop = asyncio.get_running_loop()

        def progress(phase: str, done: int, total: int) -> None:
            event = {"ev": "progress", "phase": phase, "done": done, "total": total}
            loop.call_soon_threadsafe(self._channel.send, event)

        def load() -> tuple[StageModel, int]:
            progress("loading", 0, 0)  # the compute thread is free: whatever it was at has come to an end
            if before is not None and before.is_same(plan, index):
                return before.model, 0
            if before is not None and not beside:
                reset_peak_bytes()
            with TensorSource.open(message["source"]) as source:
                if source.manifest.digest != plan.manifest:
                    raise ModelCorrupt(
                        f"the source is model {source.manifest.digest[:16]}, "
                        f"the plan is for {plan.manifest[:16]}"
                    )
                model = StageModel.load(
                    source,
                    layers=stage.layers,
                    embedding=stage.embedding,
                    head=stage.head,
                    dtype=plan.dtype,
                    device=stage.ranks[0].device,
                    blocks=plan.blocks,
                    block_size=plan.block_size,
                    chunk_tokens=plan.chunk_tokens,
                    progress=progress,
                    follows=before.model if before is not None else None,
                    beside=beside,
                    golden=self._golden.get((plan.dtype, stage.ranks[0].device)),
                )
                return model, source.bytes_read

        # The plain way is watched while a stage is checked, which must not see the steps of the one that serves.
        apart = beside and before is not None and not before.model.kernels.startswith("plain")
        model, read = await loop.run_in_executor(self._side if apart else self._thread, load)
        if model.golden is not None:
            self._golden[plan.dtype, stage.ranks[0].device] = model.golden
        limits = Limits.of(plan, hidden_size=model.hidden_size, vocab_size=model.vocab_size)
        if before is not None:
            port = before.port
        else:
            port = DataPort(self._credentials, limits, lambda: self._active, self._left_by)
            first, last = message["ports"]
            await port.start(message["host"], range(first, last + 1))
        window = int(message.get("window") or len(plan.stages))
        earlier = Before.from_message(message.get("before"))
        if earlier is not None and not earlier.fits(plan):
            earlier = None
        made = _Loaded(message["deployment"], plan, index, model, limits, window, port, earlier)
        if beside:
            self._coming = made
        else:
            self._loaded, port.limits = made, limits
        self._channel.send(
            {
                "ev": "loaded",
                "epoch": epoch_of(message),
                "port": port.port,
                "weight_bytes": model.weight_bytes,
                "kv_bytes": model.kv_bytes,
                "base_bytes": self._base_bytes,
                "peak_bytes": own_peak_bytes(),
                "read_bytes": read,
                "fingerprint": model.fingerprint,
                "numerics": model.numerics,
            }
        )

    # -- activate -------------------------------------------------------------------------------
    async def _activate(self, message: dict[str, Any]) -> None:
        coming = self._coming
        if coming is not None and list(message["epoch"]) == coming.plan.epoch.pair:
            await self._end_active()
            self._coming = None
            self._loaded, coming.port.limits = coming, coming.limits
        loaded = self._loaded
        if loaded is None or loaded.deployment != message["deployment"]:
            raise Conflict(f"deployment {message['deployment']} is not loaded here")
        epoch, plan = message["epoch"], loaded.plan
        if plan.epoch.pair != list(epoch) or plan.digest() != message["digest"]:
            raise Conflict(f"epoch {epoch} with plan {message['digest'][:16]} is not the one loaded here")
        if self._active is not None:
            return  # a COMMIT sent again: whatever is active is of the stage loaded last
        carried = None
        if loaded.before is not None:
            carried = await gather(
                loaded.before, self._left, plan, loaded.index, loaded.model, self._credentials
            )
        self._active = ActiveEpoch(
            replace(plan, numerics=str(message["numerics"])),
            loaded.index,
            deployment=loaded.deployment,
            instance=self._instance,
            fingerprint=loaded.model.fingerprint,
            limits=loaded.limits,
            window=loaded.window,
            executor=StageExecutor(
                loaded.model, plan, loaded.index, sample_rows, carried.table if carried is not None else None
            ),
            thread=self._thread,
            next_target=_target(message.get("next")),
            back_target=_target(message.get("back")),
            credentials=self._credentials,
            content=carried.content if carried is not None else (),
            tell=self._channel.send,
        )
        self._active.start()
        self._channel.send({"ev": "activated", "epoch": list(epoch)})
        if self._left is not None:
            self._parting = asyncio.create_task(self._part(), name="part with the epoch before")

    async def _part(self) -> None:
        """Once others have had time to take over what the epoch before left here, let go of it."""
        await asyncio.sleep(KEEP_S)
        self._left = None
        await self._free()
        self._channel.send({"ev": "parted"})

    async def _end_active(self) -> None:
        """End the epoch in force, if there is one, and keep what it leaves."""
        if self._parting is not None:
            self._parting.cancel()
            await asyncio.gather(self._parting, return_exceptions=True)
            self._parting = None
        async with self._ending:
            active, loaded = self._active, self._loaded
            if active is None or loaded is None:
                return
            self._active = None
            await active.close()
            # The compute thread may still be at the last step.
            await asyncio.get_running_loop().run_in_executor(self._thread, int)
            plan, table = active.plan, active.loop.executor.table
            content = active.driver.content if active.driver is not None else ()
            self._left = Left(plan, active.index, loaded.model, table, content)

    async def _left_by(self, epoch: Epoch) -> Left:
        """What an epoch leaves here, waiting a while for its end. Raises `NotReady`."""
        deadline = time.monotonic() + GATHER_S
        while time.monotonic() < deadline:
            async with self._ending:
                active, left = self._active, self._left
            if left is not None and left.plan.epoch == epoch:
                return left
            if active is None or active.plan.epoch != epoch:
                raise NotReady(f"epoch {epoch.n} has left nothing here", state="loading")
            if active.over:  # its place was given to others: no activation will end it
                await self._end_active()
            await asyncio.sleep(0.005)
        raise NotReady(f"epoch {epoch.n} goes on here", state="loading")

    async def _discard(self) -> None:
        if self._coming is not None:
            self._coming = None
            await self._free()

    async def _free(self) -> None:
        """Give back the memory of a stage that was let go of."""

        def free() -> None:
            with returned_at_once():
                gc.collect()  # modules whose own forward was put on them are cycles
            reset_peak_bytes()

        await asyncio.get_running_loop().run_in_executor(self._side, free)

    def _stats(self) -> dict[str, Any]:
        active, loaded = self._active, self._loaded
        step: dict[str, Any] = {}
        if active is not None:
            step = {"computed": active.loop.computed, "busy_s": active.loop.busy_s}
            if active.driver is not None:
                step |= active.driver.stats()
        executor = active.loop.executor if active is not None else None
        return {
            "ev": "stats",
            "peak_bytes": own_peak_bytes(),
            "blocks_used": executor.blocks_used if executor is not None else 0,
            "blocks_total": loaded.plan.blocks if loaded is not None else 0,
            "sequences": executor.sequences if executor is not None else 0,
            "step": step,
        }

    async def _close(self) -> None:
        if self._active is not None:
            await self._active.close()
        if self._loaded is not None:
            await self._loaded.port.stop()
        for thread in (self._thread, self._side):
            thread.shutdown(wait=False, cancel_futures=True)
        self._channel.close()


def _target(address: Any) -> str | None:
    if address is None:
        return None
    host, port = address
    return host_port(host, int(port))


def _available_threads() -> int:
    """``OMP_NUM_THREADS`` where it is set, else the processors that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
