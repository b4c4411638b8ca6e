"""Runs `streamppo try` for the page, in a separate process with a time limit. Only one process runs at a time.

A request must have this page as its origin, which excludes other sites. A header must have the key that `watch` has
printed, which excludes other users of this machine. A request cannot give consent to run code.
"""

import asyncio
import secrets
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from streamppo.commands import trial
from streamppo.commands.look.watching.trajectories import Trajectories
from streamppo.commands.trial import Trial
from streamppo.tasks import plugins
from streamppo.terminal import bounded

KEY = "x-streamppo-key"
"""The header with the key. A browser does not let other sites send it."""
LONGEST_S, ENDING_S = 600.0, 10.0
"""Time limit of a process, and seconds between SIGINT and SIGKILL."""
MOST_BYTES, MOST_SAID = 1024, 1000
"""Maximum bytes of a request, and characters of an error message."""
PROGRAM = (
    "import sys; from streamppo import process; process.die_with_parent(); "
    "from streamppo.cli import main; sys.exit(main(sys.argv[1:]))"
)


class TryRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for `n` continuations from token `token` of trajectory `row` in the batch that made version `update`."""

    update: int
    row: int
    token: Annotated[int, msgspec.Meta(ge=0)]
    versions: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1, max_length=2)]
    n: Annotated[int, msgspec.Meta(ge=1, le=64)]


class Tries:
    """Answers requests for the run in `folder`. If `key` is empty, all requests are refused."""

    def __init__(self, folder: Path, trajectories: Trajectories, key: str) -> None:
        self._folder, self._trajectories, self._key = folder, trajectories, key
        self._is_busy = False

    async def answer(self, request: Request) -> Response:
        key, origin = request.headers.get(KEY, ""), f"{request.url.scheme}://{request.headers.get('host')}"
        is_known = bool(self._key) and secrets.compare_digest(self._key.encode(), key.encode(errors="replace"))
        if not is_known or request.headers.get("origin") != origin:
            return _refusal(403, "to try from here, open the address that `streamppo watch` has printed")
        try:
            try_request = msgspec.json.decode(await _body(request), type=TryRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _refusal(400, f"{error}")
        if self._is_busy:
            return _refusal(409, "another try is in progress: wait until it has ended")
        self._is_busy = True
        try:
            return await self._run(await asyncio.to_thread(self._words, try_request))
        finally:
            self._is_busy = False

    def _words(self, try_request: TryRequest) -> list[str]:
        identity, prefix = self._trajectories.place(try_request.update, try_request.row)
        options = {"--prompt": identity.prompt, "--sample": identity.sample, "--attempt": identity.attempt}
        options |= {"--at": prefix + try_request.token, "-n": try_request.n}
        arguments = [f"{name}={value}" for name, value in options.items()]
        return ["try", str(self._folder), "--json", *arguments, "--version", *map(str, try_request.versions)]

    async def _run(self, words: list[str]) -> Response:
        command = [sys.executable, "-P", "-c", PROGRAM, *words]
        env = plugins.child_environment()
        process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=env)
        try:
            async with asyncio.timeout(LONGEST_S):
                out, err = await process.communicate()
        except TimeoutError:
            advice = "request fewer, or use the command line"
            return _refusal(504, f"it took more than {LONGEST_S:g} s and was ended: {advice}")
        finally:
            await _end(process)
        if not out:
            message = err.decode(errors="replace").rpartition("streamppo: ")[2].strip()
            return _refusal(422, bounded(message or f"`streamppo try` has died ({process.returncode})", MOST_SAID))
        result = msgspec.json.decode(out, type=Trial)
        names = [f"version {version.version}" for version in result.versions]
        return JSONResponse({"lines": trial.sentences(result), "names": names, "rows": trial.cells(result)})


async def _body(request: Request) -> bytes:
    """Return the request's body, or the beginning of a body that is too long."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            break
    return body


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), ENDING_S)
        process.kill()
    await process.wait()


def _refusal(status: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence}, status_code=status)
