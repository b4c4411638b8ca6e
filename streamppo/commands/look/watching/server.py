"""Serves the page of `streamppo watch` with starlette, for one run and the runs with which it is compared.

On loopback the server answers only requests whose Host header is a loopback name, so that no other site can reach it
through a domain name (DNS rebinding). On other hosts the server requires the token, first in the address and then as a
cookie.
"""

import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from streamppo import process
from streamppo.commands.console import echo
from streamppo.commands.look.watching.run_tail import CurveSource, WatchedReplay, WatchedRun
from streamppo.commands.look.watching.trajectories import Trajectories
from streamppo.config import file as configfile
from streamppo.errors import ConfigError, RunError, StreamppoError
from streamppo.telemetry.report import page
from streamppo.telemetry.watch import sections
from streamppo.telemetry.watch.sections import FOLDER

PORT = 8484
"""The preferred port. If the port is taken, any free port is used."""
ENDING_S = 1
ANYWHERE = ("0.0.0.0", "::")
"""Hosts that mean all addresses of this machine."""
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
SHORTEST_S, LONGEST_S = 2.0, 60.0
"""Shortest and longest time between two requests of the page for changes."""
SHARE = 0.03
"""Maximum share of a core for rendering the sections."""
POLICY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:"
UNREADABLE = "the run's configuration cannot be read, and so neither can its archive"
REPORT = Path(page.__file__).parent
ASSETS = {
    "/watch.css": ("text/css", [REPORT / "page.css", FOLDER / "watch.css"]),
    "/watch.js": ("text/javascript", [REPORT / "page.js", FOLDER / "watch.js", FOLDER / "trajectories.js"]),
}


def watch(run: Path, others: Sequence[Path], host: str, port: int | None) -> int:
    """Serve the page until Ctrl-C. `others` are folders of runs or files of replays.

    Raises `RunError` if the server cannot listen at `host` and `port`, and `ConfigError` if `run` is not a folder.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: the first RUN must be a run's folder; a replay can only be compared with it")
    with listen(host, port) as listener:
        token = None if host in LOOPBACK else secrets.token_urlsafe()
        echo(f"{run.name}: {address(listener, host, token)}   (Ctrl-C ends only this page)")
        if token is not None:
            echo("It goes over the network unencrypted: `ssh -L` to a page on loopback is safer.")
        app = application(run, list(others), token)
        settings = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=ENDING_S)
        uvicorn.Server(settings).run(sockets=[listener])
    return 0


def listen(host: str, port: int | None) -> socket.socket:
    """Listen at `port`, by default at `PORT` or any free port. Raises `RunError`."""
    if port is None:
        with suppress(OSError):
            return _listen(host, PORT)
    try:
        return _listen(host, port or 0)
    except OSError as error:
        raise RunError(f"{process.netloc(host, port or PORT)}: cannot listen there: {error.strerror}") from error


def _listen(host: str, port: int) -> socket.socket:
    family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family)


def address(listener: socket.socket, host: str, token: str | None) -> str:
    """Return the address to open in a browser."""
    reached = socket.gethostname() if host in ANYWHERE else host
    name = process.netloc(reached, listener.getsockname()[1])
    return f"http://{name}/" + (f"?token={token}" if token else "")


class Page:
    """The page about the run in `folder`. `others` are the runs and replays that are compared at first."""

    def __init__(self, folder: Path, others: list[Path]) -> None:
        self._run = WatchedRun(folder, folder.name)
        config = self._run.config
        self._trajectories = Trajectories(folder, config) if config else None
        self._paths: dict[str, Path] = {}
        for path in others:
            self._paths[_name(path, {folder.name, *self._paths})] = path
        self._compared = list(self._paths)
        for path in (config.parent for config in sorted(folder.parent.glob(f"*/{configfile.CONFIG}"))):
            if path not in (folder, *others):
                self._paths[_name(path, set(self._paths))] = path
        self._watched: dict[str, CurveSource] = {}
        self._lock = Lock()
        self._name = folder.name

    def shell(self, _: Request) -> Response:
        template = sections.environment().get_template("shell.html")
        text = template.render(name=self._name, others=list(self._paths), chosen=self._compared)
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    def asset(self, request: Request) -> Response:
        kind, parts = ASSETS[request.url.path]
        return Response("\n".join(part.read_text("utf-8") for part in parts), media_type=kind)

    def sections(self, request: Request) -> Response:
        """Return the sections if anything has changed, and the seconds until the next request."""
        # Several pages may send requests at the same time, each in a thread.
        with self._lock:
            names = request.query_params.getlist("with")
            chosen = [self._run, *map(self._comparison, names)]
            tag = " ".join([*names, *(source.tag() for source in chosen)])
            answer: dict[str, object] = {"tag": tag, "again_s": SHORTEST_S}
            if tag != request.query_params.get("tag"):
                begun = time.thread_time()
                shown = [source.run_view() for source in chosen]
                answer |= {"version": shown[0].state.version, "sections": sections.sections(shown)}
                answer["again_s"] = min(LONGEST_S, max(SHORTEST_S, (time.thread_time() - begun) / SHARE))
        return JSONResponse(answer)

    def batch(self, request: Request) -> Response:
        return JSONResponse(self._archive().batch(request.path_params.get("update")))

    def trajectory(self, request: Request) -> Response:
        return JSONResponse(self._archive().open(request.path_params["update"], request.path_params["row"]))

    def _archive(self) -> Trajectories:
        if self._trajectories is None:
            raise StreamppoError(UNREADABLE)
        return self._trajectories

    def _comparison(self, name: str) -> CurveSource:
        if name not in self._paths:
            raise StreamppoError(f"{name}: no such run in this folder")
        if name not in self._watched:
            path = self._paths[name]
            self._watched[name] = WatchedRun(path, name) if path.is_dir() else WatchedReplay(path)
        return self._watched[name]


def application(folder: Path, others: list[Path], token: str | None) -> Starlette:
    """Return the application. It answers only requests with the `token` or, without a token, to a loopback name."""
    page = Page(folder, others)
    routes = [
        Route("/", page.shell),
        *(Route(path, page.asset) for path in ASSETS),
        Route("/sections", page.sections),
        Route("/batch", page.batch),
        Route("/batch/{update:int}", page.batch),
        Route("/batch/{update:int}/{row:int}", page.trajectory),
    ]
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK), www_redirect=False)
    if token is not None:
        guard = Middleware(BaseHTTPMiddleware, dispatch=_asking_for(token))

    def refuse(_: Request, error: Exception) -> Response:
        is_known = isinstance(error, StreamppoError)
        text = str(error) if is_known else f"{type(error).__name__}: {error}"
        return JSONResponse({"error": text}, status_code=404 if is_known else 500)

    handlers = {StreamppoError: refuse, Exception: refuse}
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)


def _asking_for(token: str) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    """Return middleware that requires the token as a cookie, and sets the cookie if the token is in the address."""

    async def dispatch(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        # Cookies are shared between the ports of a host, so the name contains the port.
        name = f"streamppo-{request.url.port}"
        if _is(token, request.cookies.get(name)):
            return await answer(request)
        if request.url.path == "/" and _is(token, request.query_params.get("token")):
            entered = RedirectResponse("/", status_code=303)
            entered.set_cookie(name, token, httponly=True, samesite="strict")
            return entered
        return PlainTextResponse("the address that `streamppo watch` has printed has a token in it\n", status_code=403)

    return dispatch


def _is(token: str, presented: str | None) -> bool:
    return secrets.compare_digest(token.encode(), (presented or "").encode(errors="replace"))


def _name(path: Path, taken: set[str]) -> str:
    """Return the name of a run or a replay on the page, with more of its path if its short name is taken."""
    short = path.name if path.is_dir() else f"{path.parent.parent.name} {path.stem}"
    longer = f"{path.parent.name}/{short}"
    return next(name for name in (short, longer, f"{path}") if name not in taken or name == f"{path}")
