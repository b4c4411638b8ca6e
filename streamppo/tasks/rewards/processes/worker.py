"""The processes in which user rewards run: python -m streamppo.tasks.rewards.processes.worker FD.

    template    imports the reward once, then forks on demand: a new process starts in milliseconds, however long the
                import took. It has one thread and runs no call.
    process     a fork of it, leader of its own process group, under a memory limit: runs calls and may die during them

When the actor ends, the template and all its descendants end too (reaper.py).
"""

import asyncio
import contextlib
import contextvars
import os
import re
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from msgspec import structs

from streamppo import process
from streamppo.errors import TaskError
from streamppo.process import die_with_parent
from streamppo.tasks import user_traceback
from streamppo.tasks.coroutines import TooLate, within
from streamppo.tasks.rewards import signature
from streamppo.tasks.rewards.outcome import Outcome, too_late
from streamppo.tasks.rewards.processes import reaper, wire
from streamppo.tasks.rewards.processes.shared_page import CALL, SharedPage, mark_tasks, write_stack_at_signal
from streamppo.tasks.rewards.signature import LoadedReward

ENDING_S = 5.0
"""A process is killed if it does not end within this time after its socket has closed."""
CHECK_S = 0.001
OUT_OF_MEMORY = re.compile(
    r"(?<!OutOf)MemoryError|can(no|')t allocate memory|can't start new thread|bad_alloc|failed to map segment",
    re.IGNORECASE,
)
"""Matches messages about too little memory (also for a thread's stack), but not torch's OutOfMemoryError of a GPU."""


def main(fd: int) -> None:
    """Run the template process. `fd` is its socket to the actor."""
    reaper.fork_template()
    process.escape_unprintable()
    channel = socket.socket(fileno=fd)
    setup = wire.receive(channel, wire.LoadReward)
    try:
        reward = signature.load(setup.function, setup.arguments)
    except TaskError as error:
        return wire.send(channel, wire.Ready(error=str(error)))
    process.freeze_gc()
    wire.send(channel, wire.Ready())
    processes: set[int] = set()
    try:
        while True:
            _obey(channel, reward, setup, processes)
    except (EOFError, ConnectionError):
        for pid in processes:
            _kill(pid)


def _obey(channel: socket.socket, reward: LoadedReward, setup: wire.LoadReward, processes: set[int]) -> None:
    order, fds = wire.receive_order(channel)
    if not fds:
        # The pid of an already collected process may have been reused by another process.
        if order.pid in processes:
            _kill(order.pid)
        return wire.send(
            channel, wire.ProcessStarted(pid=order.pid, status=_collect(order.pid, processes) if order.collect else 0)
        )
    template, pid = os.getpid(), os.fork()
    if pid == 0:
        channel.close()
        _run_fork(socket.socket(fileno=fds[0]), fds[1], reward, setup.memory_mib, template=template)
    for fd in fds:
        os.close(fd)
    processes.add(pid)
    wire.send(channel, wire.ProcessStarted(pid=pid))


def _collect(pid: int, processes: set[int]) -> int:
    """Wait for the end of a process, kill its process group, and return its exit status."""
    deadline = time.monotonic() + ENDING_S
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            _kill(pid)
        time.sleep(CHECK_S)
    _, status = ended
    processes.discard(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def _kill(pid: int) -> None:
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def _run_fork(
    channel: socket.socket, page_fd: int, reward: LoadedReward, memory_mib: int, *, template: int
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        die_with_parent()
        if os.getppid() != template:
            os._exit(1)
        write_stack_at_signal(page_fd)
        _seed()
        _limit_memory(memory_mib)
        if reward.signature.is_async:
            asyncio.run(_serve_async(channel, SharedPage(page_fd), reward, memory_mib))
        else:
            # The actor enforces the time limit.
            while True:
                call = wire.receive(channel, wire.Call)
                outcomes = _name_limit(signature.call(reward, call.texts, call.columns), memory_mib)
                wire.send(channel, wire.ScoringAnswer(number=call.number, outcomes=outcomes))
    except (EOFError, asyncio.IncompleteReadError, ConnectionError):
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else code
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def _seed() -> None:
    """Seed numpy and torch, whose random states a fork copies from the template. Python seeds itself after a fork."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def _limit_memory(memory_mib: int) -> None:
    """Allow `memory_mib` of private memory beyond the present use. A larger allocation raises MemoryError."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    used_kib = next(int(line.split()[1]) for line in status.read_bytes().split(b"\n") if line.startswith(b"VmData:"))
    limit = used_kib * 2**10 + memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _name_limit(outcomes: tuple[Outcome, ...], memory_mib: int) -> tuple[Outcome, ...]:
    """Name the memory limit in the reasons of failures that it may have caused."""
    advice = f"; the reward's memory_mib ({memory_mib}) bounds memory and the stacks of threads: raise it"
    return tuple(
        structs.replace(outcome, reason=outcome.reason + advice)
        if outcome.whole and OUT_OF_MEMORY.search(outcome.reason)
        else outcome
        for outcome in outcomes
    )


async def _serve_async(channel: socket.socket, page: SharedPage, reward: LoadedReward, memory_mib: int) -> NoReturn:
    """Serve all calls concurrently, each with its time limit. The actor watches for steps that do not end."""
    reader, writer = await asyncio.open_connection(sock=channel)
    mark_tasks(asyncio.get_running_loop(), page)
    outbox = wire.Outbox(writer)
    running: set[asyncio.Task[None]] = set()
    while True:
        call = await wire.receive_async(reader, wire.Call)
        context = contextvars.copy_context()
        context.run(CALL.set, call.number)
        task = asyncio.create_task(_answer(outbox, reward, call, memory_mib), context=context)
        running.add(task)
        task.add_done_callback(running.discard)


async def _answer(outbox: wire.Outbox, reward: LoadedReward, call: wire.Call, memory_mib: int) -> None:
    try:
        limit = asyncio.timeout(call.timeout_s)
        outcomes = await within(limit, signature.call_async(reward, call.texts, call.columns))
        outcomes = _name_limit(outcomes, memory_mib)
    except TooLate as error:
        outcomes = (too_late(call.limit_s, user_traceback.locate(error)),) * len(call.texts)
    outbox.put(wire.frame(wire.ScoringAnswer(number=call.number, outcomes=outcomes)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # A thread of the reward's module would keep the process alive, and the actor waits for its end.
    os._exit(0)
