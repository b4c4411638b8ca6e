"""SGLang in child processes of the actor. The processes are tied to one thread of the actor and end with the thread."""

# SGLang is not installed where this project is type-checked.
# pyright: reportMissingImports=false

import asyncio
import atexit
import ctypes
import inspect
import os
import signal
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeAlias

from streamppo.errors import ModelError
from streamppo.rollout.sglang import checks, processes, wire
from streamppo.rollout.sglang.link import HEALTH_S, Answer
from streamppo.rollout.sglang.processes import EngineThread, ProcessOutput

REQUESTS = {
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "weights_checker": "CheckWeightsReqInput",
}
"""The request class of each endpoint of SGLang. The method of its tokenizer manager has the endpoint's name."""
METHODS = {"weights_checker": "check_weights"}


SGLang: TypeAlias = Any
"""An `sglang.Engine`. Its method `shutdown` kills every child process of this process: never call it."""


class ProcessLink:
    """A `Link` to the processes of `engine`, which were started in `thread` and write to `output`."""

    def __init__(self, thread: EngineThread, engine: SGLang, output: ProcessOutput, settings: "LaunchSettings") -> None:
        self.capacity, self.ranks = settings.capacity, settings.ranks
        self.longest = checks.longest(engine._scheduler_init_result.scheduler_infos[0])
        # With a tokenizer, tokens pass through the detokenizer's process, and answers to calls may overtake them.
        self.is_ordered = bool(settings.arguments.get("skip_tokenizer_init"))
        self._thread, self._engine, self._output = thread, engine, output
        self._processes = thread.processes()

    async def call(self, name: str, /, **fields: object) -> Answer:
        return await self._thread.run(self._call(name, fields))

    async def stream(self, **fields: object) -> AsyncGenerator[Answer]:
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        deliver = partial(loop.call_soon_threadsafe, answers.put_nowait)
        work = asyncio.ensure_future(self._thread.run(self._stream(fields, deliver)))
        work.add_done_callback(lambda done: answers.put_nowait(None))
        try:
            while (answer := await answers.get()) is not None:
                yield answer
            await work
        finally:
            work.cancel()

    async def abort(self, rid: str) -> None:
        self._thread.call_soon(partial(self._engine.tokenizer_manager.abort_request, rid=rid))

    async def death(self) -> str:
        self._output.show()
        if all(process.is_alive() for process in self._processes):
            return ""
        return processes.killed(self._processes) or self._output.reason() or "a process ended"

    async def stop(self) -> None:
        if self._thread.has_ended:
            return
        atexit.unregister(self._engine.shutdown)
        self._engine.tokenizer_manager._subprocess_watchdog.stop()
        await self._thread.end()
        self._output.close()

    async def _stream(self, fields: Mapping[str, object], deliver: Callable[[Answer], object]) -> None:
        """Call `generate` and pass each answer to `deliver` as it arrives. Runs in SGLang's thread."""
        from sglang.srt.managers import io_struct

        async for answer in self._engine.tokenizer_manager.generate_request(io_struct.GenerateReqInput(**fields), None):
            deliver(answer)

    async def _call(self, name: str, fields: Mapping[str, object]) -> Answer:
        from sglang.srt.managers import io_struct

        manager = self._engine.tokenizer_manager
        if name == "generate":
            from fastapi import HTTPException

            try:
                return await anext(manager.generate_request(io_struct.GenerateReqInput(**fields), None))
            except HTTPException as refused:
                # For example, SGLang lacks memory. A server would answer with this error.
                raise ValueError(refused.detail) from refused
        method: Callable[[object], Awaitable[Answer]] = getattr(manager, METHODS.get(name, name))
        answer = await method(getattr(io_struct, REQUESTS[name])(**fields))
        if not isinstance(answer, tuple):
            return answer
        success, message, *details = answer
        if not success:
            raise ValueError(message)
        return details[0] if details else None


class LaunchSettings(NamedTuple):
    """Settings for the start: SGLang's `arguments`, and the `environment` of its processes."""

    arguments: Mapping[str, object]
    environment: Mapping[str, str]
    capacity: int
    ranks: int
    seed: int
    start_s: float


async def start(settings: LaunchSettings, number: int) -> ProcessLink:
    """Start SGLang's processes, with the seed `settings.seed + number`.

    Raises `ModelError` if they do not start, and `ConnectionError` if one of them is killed meanwhile, or if another
    process has taken a port.
    """
    # SGLang's processes send SIGQUIT to their parent when they die, which by default would end the parent.
    ctypes.CDLL(None).signal(signal.SIGQUIT, ctypes.c_void_p(signal.SIG_IGN))
    descriptor, log = tempfile.mkstemp(prefix="streamppo-sglang-", suffix=".log")
    async with AsyncExitStack() as undo:
        file = undo.enter_context(os.fdopen(descriptor, "rb"))
        output = ProcessOutput(file, logs_lines=settings.arguments.get("log_level") != "error")
        # The processes keep the unlinked file open; it disappears when the last of them dies.
        undo.callback(os.unlink, log)
        thread, started = EngineThread(f"sglang-{number}"), set[BaseProcess]()
        undo.push_async_callback(thread.end)
        try:
            async with asyncio.timeout(settings.start_s):
                work = thread.run(_build(settings, settings.seed + number, log))
                engine = await _log_output_during(output, work, thread, started)
        except ModelError:
            await thread.end()
            raise
        except Exception as error:
            # SGLang may raise any error. Its output is complete when its processes have ended.
            killed = processes.killed(started)
            await thread.end()
            output.show()
            timeout = f"not within rollout.engine.start_s ({settings.start_s:g} s)"
            reason = timeout if isinstance(error, TimeoutError) else str(error).partition("\n")[0]
            # SGLang finds a free port long before it listens there, and other engines of the machine may take it.
            if output.reason().startswith(processes.PORT) or (killed and not output.reason()):
                raise ConnectionError(output.reason() or killed) from error
            raise ModelError(f"SGLang cannot start: {output.reason() or reason}") from error
        undo.pop_all()
        os.unlink(log)
    return ProcessLink(thread, engine, output, settings)


async def _log_output_during(
    output: ProcessOutput, work: Awaitable[SGLang], thread: EngineThread, started: set[BaseProcess]
) -> SGLang:
    """Return the result of `work`. Meanwhile, log SGLang's output, and add its processes to `started`."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=HEALTH_S)
            started.update(thread.processes())
            output.show()
        return await task
    finally:
        task.cancel()


async def _build(settings: LaunchSettings, seed: int, log: str) -> SGLang:
    """Construct SGLang's engine. Runs in SGLang's thread. Raises `ModelError` for an unknown argument."""
    arguments = settings.arguments
    os.environ.update(settings.environment)
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.server_args import ServerArgs

    wire.check_arguments(arguments, inspect.signature(ServerArgs).parameters)

    class Logged(Engine):
        run_scheduler_process_func = staticmethod(_logged(run_scheduler_process, log))
        run_detokenizer_process_func = staticmethod(_logged(run_detokenizer_process, log))

    return Logged(**arguments, random_seed=seed)


def _logged(function: Callable[..., object], log: str) -> Callable[..., object]:
    return partial(processes.run, log, f"{function.__module__}:{function.__name__}")
