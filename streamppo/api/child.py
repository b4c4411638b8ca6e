"""The process of a script's run: `python -m streamppo.api.child FD`. When the socket FD closes, it gets SIGTERM."""

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from threading import Thread

import msgspec

from streamppo import __version__, durable, process
from streamppo.api.messages import RewardSource, RunReply, RunRequest, encode
from streamppo.commands import end, run_argument
from streamppo.commands.checks import check
from streamppo.config import consent
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import run_folder, threads
from streamppo.driver.ray.interrupts import Interrupts
from streamppo.errors import StreamppoError

STARTED = time.perf_counter()

log = logging.getLogger("streamppo.api.child")


def main(descriptor: int) -> int:
    """Start or resume the run that the script requests. Returns the same exit code as `streamppo run`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    channel = socket.socket(fileno=descriptor)
    lines = channel.makefile("rb")
    request = msgspec.json.decode(lines.readline(), type=RunRequest)
    Thread(target=_stop_with_script, args=(lines,), daemon=True).start()
    process.log_to_stdout()
    try:
        return _resume(request, channel) if request.folder else _start(request, channel)
    except StreamppoError as error:
        channel.sendall(encode(RunReply(error=type(error).__name__, text=str(error))))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _stop_with_script(lines: BufferedReader) -> None:
    # The read raises ConnectionResetError if the script ends with unread replies.
    with suppress(ConnectionError):
        lines.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _start(request: RunRequest, channel: socket.socket) -> int:
    with tempfile.TemporaryDirectory() as aside:
        config = _load(request, Path(aside))
        interrupts = Interrupts()
        log.info(f"streamppo {__version__}: {request.config or config.name}, {config.updates} updates; starting Ray")
        from streamppo import loop

        folder = loop.new_folder(config, Path(request.runs).resolve())
    if request.data or (request.reward is not None and request.reward.source):
        config = configfile.change(config, _file_overrides(request, folder))
        configfile.save(config, folder)
        consent.give(folder, config)
    return _train(request, config, folder, channel, interrupts)


def _load(request: RunRequest, aside: Path) -> Config:
    """Load and check the configuration. No error names the folder `aside`, which gets the script's rows and reward."""
    try:
        overrides = [*request.overrides, *_file_overrides(request, aside)]
        if request.fields is None:
            config = configfile.load(Path(request.config), overrides)
        else:
            config = configfile.from_fields(request.fields, overrides)
        check.refuse(config)
        return config
    except StreamppoError as error:
        text = str(error).replace(str(aside / configfile.DATA), "data").replace(f"{aside}/", "")
        raise type(error)(text) from error


def _resume(request: RunRequest, channel: socket.socket) -> int:
    folder = configfile.existing(Path(request.folder))
    config = threads.with_recorded(configfile.load(folder / configfile.CONFIG, request.overrides), folder)
    with run_folder.driver_lock(folder):
        if complete := run_folder.nothing_to_do(config, folder):
            channel.sendall(encode(RunReply(folder=str(folder))))
            log.info(complete)
            return 0
    run_argument.agree_to_changes(folder, config)
    check.refuse(config)
    return _train(request, config, folder, channel, Interrupts())


def _train(request: RunRequest, config: Config, folder: Path, channel: socket.socket, interrupts: Interrupts) -> int:
    from streamppo import loop

    with run_folder.driver_lock(folder):
        channel.sendall(encode(RunReply(folder=str(folder))))
        changes = request.accept_changes
        return loop.run(config, folder, started=STARTED, interrupts=interrupts, accept_changes=changes)


def _file_overrides(request: RunRequest, folder: Path) -> list[str]:
    """Return the overrides for the script's rows and reward. Writes their files to `folder`."""
    overrides = [] if request.reward is None else [_reward_override(request.reward, folder)]
    if request.data:
        file = folder / configfile.DATA
        durable.write(file, Path(request.data).read_bytes())
        overrides.append(f"task.data={msgspec.json.encode(str(file)).decode()}")
    return overrides


def _reward_override(reward: RewardSource, folder: Path) -> str:
    """Return the override that sets `reward.function` to the script's reward. Writes the source to `folder`."""
    function = reward.function
    if reward.source:
        durable.write(folder / configfile.REWARD, reward.source.encode())
        function = f"{folder / configfile.REWARD}:{reward.function}"
    return f"reward.function={msgspec.json.encode(function).decode()}"


if __name__ == "__main__":
    process.open_closed_streams()
    end.leave(main(int(sys.argv[1])))
