"""Serves the page of a run until the command ends. Needs neither Ray nor torch."""

import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn

from streamppo.commands.console import echo
from streamppo.commands.look.watching import server
from streamppo.errors import ConfigError, RunError

PORT = 8484
"""The port if it is free; else any other."""
ENDING_S = 1
"""Seconds that open requests have after Ctrl-C."""
ANYWHERE = ("0.0.0.0", "::")
"""Hosts for every address of this machine."""


def watch(run: Path, others: Sequence[Path], host: str, port: int | None) -> int:
    """Answer requests until Ctrl-C. Raises `RunError` if it cannot listen at `host` and `port`.

    `run` is a folder; `others` are folders or files of replays. Raises `ConfigError` for another `run`.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: the first RUN is the folder of one; a replay can be compared with it")
    listener = listening(host, port)
    token, key = None if host in server.LOOPBACK else secrets.token_urlsafe(), secrets.token_urlsafe()
    echo(f"{run.name}: {address(listener, host, token)}#key={key}   (Ctrl-C ends only this page)")
    if token is not None:
        echo("It goes over the network unencrypted: `ssh -L` to a page on loopback is safer.")
    app = server.application(run, list(others), token, key)
    settings = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=ENDING_S)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run(sockets=[listener])
    return 0


def listening(host: str, port: int | None) -> socket.socket:
    """Listen at `port`, by default at `PORT` or, if that is taken, at any other. Raises `RunError`."""
    if port is None:
        with suppress(OSError):
            return _listening(host, PORT)
    try:
        return _listening(host, port or 0)
    except OSError as error:
        raise RunError(f"{host}:{port or PORT}: cannot listen there: {error.strerror}") from error


def _listening(host: str, port: int) -> socket.socket:
    family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family)


def address(listener: socket.socket, host: str, token: str | None) -> str:
    """The address to open in a browser."""
    reached = socket.gethostname() if host in ANYWHERE else host
    name = f"[{reached}]" if ":" in reached else reached
    return f"http://{name}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
