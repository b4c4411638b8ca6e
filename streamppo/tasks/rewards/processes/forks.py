"""Forks the processes of one reward from its template, and replaces a dead template."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Coroutine

from streamppo.config.reward import FunctionScorer
from streamppo.errors import TaskError
from streamppo.tasks.rewards.processes import shared_page, template
from streamppo.tasks.rewards.processes.process import Process
from streamppo.tasks.rewards.processes.shared_page import SharedPage
from streamppo.tasks.rewards.processes.template import TemplateDied, TemplateProcess

DEATHS = 5
"""Maximum number of deaths of the template between two scores."""

log = logging.getLogger(__name__)


class Forks:
    """Forks processes, and waits for the end of each. A dead template is replaced at the next fork."""

    def __init__(self, config: FunctionScorer, template: TemplateProcess) -> None:
        self.template_deaths = 0
        """Number of deaths of the template since the last score."""
        self._config = config
        self._template = template
        self._forking = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def fork(self) -> Process:
        """Fork a process.

        Raises `TaskError` if the template died too often or cannot load the reward again, or if the actor has too many
        open files or too little memory.
        """
        try:
            async with self._forking:
                return await self._fork_or_replace()
        except OSError as error:
            raise TaskError(f"no process for {self._config.function!r}: {error}") from error

    def end(self, process: Process) -> None:
        """Kill a process, and give it no more calls."""
        if not process.ended:
            process.ended = process.killed = True
            self.keep(self._kill(process.pid))

    def keep(self, coroutine: Coroutine[None, None, None]) -> None:
        """Run a coroutine until it ends or `close` cancels it."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._template.close()

    async def _fork_or_replace(self) -> Process:
        while True:
            try:
                return await self._fork()
            except TemplateDied as error:
                await self._replace_template(error)

    async def _fork(self) -> Process:
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as at_end:
            ours, theirs = socket.socketpair()
            on_failure.enter_context(ours)
            at_end.enter_context(theirs)
            memory = shared_page.create()
            at_end.callback(os.close, memory)
            pid = await self._template.fork(theirs, memory)
            theirs.close()
            ours.setblocking(False)
            process = Process(pid, *await asyncio.open_connection(sock=ours), SharedPage(memory))
            on_failure.pop_all()
        self.keep(self._follow(process, self._template))
        return process

    async def _follow(self, process: Process, parent: TemplateProcess) -> None:
        try:
            await process.listen()
        finally:
            process.ended = True
            process.writer.close()
        try:
            process.fail_calls(await parent.collect(process.pid))
        except TemplateDied:
            process.orphan_calls()

    async def _kill(self, pid: int) -> None:
        # The processes of a dead template have died with it.
        with contextlib.suppress(TemplateDied):
            await self._template.kill(pid)

    async def _replace_template(self, error: TemplateDied) -> None:
        self.template_deaths += 1
        if self.template_deaths > DEATHS:
            raise TaskError(f"{error}, {self.template_deaths} times without a score in between") from error
        log.warning("%s: it is replaced", error)
        await self._template.close()
        self._template = await template.start(self._config)
