"""An engine of the actor's own: SGLang's processes, which live and die with one thread of this one."""

# SGLang is not part of what this project is checked with.
# pyright: reportMissingImports=false

import asyncio
import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

from streamppo.errors import ModelError
from streamppo.rollout.sglang import child, wire


class Handler(NamedTuple):
    """How SGLang's tokenizer manager calls what its server calls otherwise."""

    request: str
    method: str


HANDLERS = {
    "pause_generation": Handler("PauseGenerationReqInput", "pause_generation"),
    "continue_generation": Handler("ContinueGenerationReqInput", "continue_generation"),
    "begin_weight_update": Handler("BeginWeightUpdateReqInput", "begin_weight_update"),
    "end_weight_update": Handler("EndWeightUpdateReqInput", "end_weight_update"),
    "update_weights_from_tensor": Handler("UpdateWeightsFromTensorReqInput", "update_weights_from_tensor"),
    "update_weights_from_disk": Handler("UpdateWeightFromDiskReqInput", "update_weights_from_disk"),
    "update_weights_from_distributed": Handler(
        "UpdateWeightsFromDistributedReqInput", "update_weights_from_distributed"
    ),
    "init_weights_update_group": Handler("InitWeightsUpdateGroupReqInput", "init_weights_update_group"),
    "get_weights_by_name": Handler("GetWeightsByNameReqInput", "get_weights_by_name"),
    "weights_checker": Handler("CheckWeightsReqInput", "check_weights"),
}


class OwnEngine:
    """`sglang.Engine` in a thread with an event loop of its own: the processes that it starts die with that thread.

    `environment` is that of those processes; `arguments` are SGLang's.
    """

    def __init__(
        self,
        version: tuple[int, ...],
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        *,
        seed: int,
        start_s: float,
    ) -> None:
        self.version = version
        self.capacity, self.ranks = arguments["max_running_requests"], arguments["tp_size"]
        self._arguments, self._environment, self._seed, self._start_s = arguments, environment, seed, start_s
        self._engine: Any = None
        self._children: list[Any] = []
        # SGLang's processes send their parent this signal when they die; its default is to end the process.
        ctypes.CDLL(None).signal(signal.SIGQUIT, ctypes.c_void_p(1))

    async def start(self, life: int) -> None:
        """See `Link.start`."""
        descriptor, self._log = tempfile.mkstemp(prefix="streamppo-sglang-", suffix=".log")
        self._output = os.fdopen(descriptor, "rb")
        self._others = {process.pid for process in multiprocessing.active_children()}
        self._other_contexts = {id(context) for context in _contexts()}
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=f"sglang-{life}", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(self._start_s):
                self._engine = await self._there(self._build(self._seed + life))
        except Exception as error:
            await self.stop()
            late = f"not within rollout.engine.start_s ({self._start_s:g} s)"
            why = late if isinstance(error, TimeoutError) else str(error).partition("\n")[0]
            raise ModelError(f"SGLang cannot start: {self._reason() or why}") from error
        finally:
            # Whoever writes to it has it open: nothing is left of it when the last of them dies.
            os.unlink(self._log)
        self._children = self._own()

    async def call(self, name: str, /, **fields: Any) -> Any:
        """See `Link.call`."""
        return await self._there(self._call(name, fields))

    async def abort(self, rid: str) -> None:
        """See `Link.abort`."""
        if self._engine is not None:
            self._loop.call_soon_threadsafe(partial(self._engine.tokenizer_manager.abort_request, rid=rid))

    async def death(self) -> str:
        """See `Link.death`."""
        ended = [process.exitcode for process in self._children if not process.is_alive()]
        if not ended:
            return ""
        killed = [signal.Signals(-code).name for code in ended if code < 0]
        return f"one of its processes was killed by {killed[0]}" if killed else self._reason() or "a process ended"

    async def stop(self) -> None:
        """See `Link.stop`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            # Its own shutdown would kill every process that this one ever started.
            atexit.unregister(engine.shutdown)
            engine.tokenizer_manager._subprocess_watchdog.stop()
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._end)
        # A start that is given up may bring up more of them before it notices.
        while self._thread.is_alive():
            await asyncio.to_thread(_kill, self._own())
            await asyncio.to_thread(self._thread.join, 1.0)
        self._loop.close()

    def _end(self) -> None:
        """Stop the loop once everything in it has heard that it is cancelled. In SGLang's thread."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()

        def stop(_: Any) -> None:
            # One that is left to the garbage collector waits for ever, in any thread, for messages to the dead.
            for context in _contexts():
                if id(context) not in self._other_contexts:
                    context.destroy(linger=0)
            self._loop.stop()

        asyncio.gather(*tasks, return_exceptions=True).add_done_callback(stop)

    def _own(self) -> list[Any]:
        """The processes that SGLang has started."""
        return [process for process in multiprocessing.active_children() if process.pid not in self._others]

    async def _there(self, work: Coroutine[Any, Any, Any]) -> Any:
        """`work`, done in SGLang's thread."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(future)

    async def _build(self, seed: int) -> Any:
        os.environ.update(self._environment)
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
        from sglang.srt.managers.scheduler import run_scheduler_process

        class Logged(Engine):
            run_scheduler_process_func = staticmethod(self._logged(run_scheduler_process))
            run_detokenizer_process_func = staticmethod(self._logged(run_detokenizer_process))

        return Logged(**self._arguments, random_seed=seed)

    def _logged(self, function: Any) -> Any:
        return partial(child.run, self._log, f"{function.__module__}:{function.__name__}")

    async def _call(self, name: str, fields: dict[str, Any]) -> Any:
        from sglang.srt.managers import io_struct

        manager = self._engine.tokenizer_manager
        if name == "generate":
            return await anext(manager.generate_request(io_struct.GenerateReqInput(**fields), None))
        handler = HANDLERS[name]
        if not hasattr(manager, handler.method):
            raise NotImplementedError(name)
        answer = await getattr(manager, handler.method)(getattr(io_struct, handler.request)(**fields))
        if not isinstance(answer, tuple):
            return answer
        success, message, *more = answer
        if not success:
            raise ValueError(message)
        return more[0] if more else None

    def _reason(self) -> str:
        self._output.seek(0)
        return wire.reason(self._output.read().decode(errors="replace"))


def _kill(children: list[Any]) -> None:
    for process in children:
        process.kill()
        process.join()


def _contexts() -> list[Any]:
    """Every open ZeroMQ context of this process."""
    import zmq

    return [thing for thing in gc.get_objects() if issubclass(type(thing), zmq.Context) and not thing.closed]
