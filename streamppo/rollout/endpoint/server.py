"""The endpoint of one rollout actor: one port, served in the actor's event loop. A request's key names its session.

    POST /v1/chat/completions                    OpenAI's chat completions
    POST /v1/responses                           OpenAI's responses
    POST /v1/messages, /v1/messages/count_tokens    Anthropic's messages
    POST /v1/reward                              {"reward": 1.0, "response_id": "..."} of the run, or of one response
    GET  /v1/models, /v1/models/NAME             the policy, by any name

A key comes as `Authorization: Bearer`, as `x-api-key`, or in the address: /key/KEY/v1/... On loopback a request
must name a loopback host, so that a web page cannot reach the endpoint by a host name of its own (DNS rebinding).
"""

import asyncio
import contextlib
import logging
import re
import secrets
import socket
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import cast

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from streamppo import process
from streamppo.errors import RunError, TaskError
from streamppo.rollout.endpoint import json_values
from streamppo.rollout.endpoint.dialects import wire
from streamppo.rollout.endpoint.dialects.chat import Chat
from streamppo.rollout.endpoint.dialects.messages import Messages
from streamppo.rollout.endpoint.dialects.responses import Responses
from streamppo.rollout.endpoint.dialects.wire import Body, Dialect
from streamppo.rollout.endpoint.request import RequestRefused, Turn, malformed, run_ended
from streamppo.rollout.endpoint.session import Session
from streamppo.tasks.rewards.outcome import number

LOOPBACK = ("127.0.0.1", "localhost", "::1")
BODY_BYTES = 16 * 2**20
NOTED = 100
KEEP_ALIVE_S = 5.0
"""Time between two keep-alive events of a waiting stream."""
REMEMBERED = 10_000
"""The number of ended runs whose keys are still recognised."""
CLOSING_S = 1
KEY_IN_PATH = re.compile("^/key/[^/]*")
IDLE_S = 300
"""Time that an idle connection stays open, for programs with slow tools."""

log = logging.getLogger(__name__)
Handler = Callable[[HttpRequest, Session, Body], Awaitable[Response]]


class Endpoint:
    """Listens at `host` on a free port, from `start` to `stop`. `counts` counts requests, and refusals by reason."""

    def __init__(self, host: str) -> None:
        self.counts: Counter[str] = Counter()
        self._host, self._local = host, host in LOOPBACK
        self._sessions: dict[str, Session] = {}
        self._ended_keys: OrderedDict[str, str] = OrderedDict()
        self._logged_parameters: set[str] = set()
        self._num_opened = 0
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        """Begin to listen. Raises `RunError` if the address is not this machine's."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((self._host, 0))
        except OSError as error:
            listener.close()
            raise RunError(f"environment.host = {self._host!r} is not an address of this machine: {error}") from error
        self.address = f"http://{process.netloc(reachable(self._host), listener.getsockname()[1])}"
        config = uvicorn.Config(
            self._application(),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=CLOSING_S,
            timeout_keep_alive=IDLE_S,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        for session in list(self._sessions.values()):
            self.close(session)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving])

    def open(self, make: Callable[[str], Session]) -> Session:
        self._num_opened += 1
        name = f"{self._num_opened:x}"
        session = self._sessions[name] = make(f"sp-{name}-{secrets.token_urlsafe(32)}")
        return session

    def close(self, session: Session) -> None:
        """End a session; a later request with its key gets 410."""
        name = _session_name(session.key)
        session.end()
        if self._sessions.pop(name, None) is not None:
            self._ended_keys[name] = session.key
            while len(self._ended_keys) > REMEMBERED:
                self._ended_keys.popitem(last=False)

    def _application(self) -> Starlette:
        chat, messages, responses = Chat(), Messages(), Responses()
        routes = [
            self._route("/v1/chat/completions", chat, self._generate(chat)),
            self._route("/v1/responses", responses, self._generate(responses)),
            self._route("/v1/messages", messages, self._generate(messages)),
            self._route("/v1/messages/count_tokens", messages, _count_tokens(messages)),
            self._route("/v1/reward", chat, _add_reward),
            self._route("/v1/models", chat, _list_models, "GET"),
            self._route("/v1/models/{name:path}", chat, _describe_model, "GET"),
        ]
        handlers = {404: self._refuse_address, 405: self._refuse_address, 500: self._report_fault}
        return Starlette(routes=[*routes, Mount("/key/{key}", routes=routes)], exception_handlers=handlers)

    async def _refuse_address(self, request: HttpRequest, error: Exception) -> Response:
        path = KEY_IN_PATH.sub("", request.url.path)
        message = (
            f"the endpoint has no {request.method} {path}: it has chat/completions, responses, messages, "
            "messages/count_tokens, reward and models below /v1. The base_url of OpenAI's clients ends in /v1, that of "
            "Anthropic's does not"
        )
        status = error.status_code if isinstance(error, HTTPException) else 404
        return self._refuse(request, RequestRefused(status, "not_found", message, "another address"))

    async def _report_fault(self, request: HttpRequest, error: Exception) -> Response:
        fault = f"the endpoint failed: {type(error).__name__}: {error}"
        return self._refuse(request, RequestRefused(500, "server_error", fault, "endpoint failed"))

    def _refuse(self, request: HttpRequest, error: RequestRefused) -> Response:
        self.counts[error.reason] += 1
        dialect = Messages() if "/v1/messages" in request.url.path else Chat()
        return JSONResponse(dialect.error(error), status_code=error.status)

    def _route(self, path: str, dialect: Dialect, answer: Handler, method: str = "POST") -> Route:
        async def endpoint(request: HttpRequest) -> Response:
            try:
                if self._local and request.url.hostname not in LOOPBACK:
                    message = f"the endpoint answers only under the names {', '.join(LOOPBACK)}"
                    raise RequestRefused(403, "host_not_allowed", message, "another host's name")
                session = self._session(request)
                body = await _body(request) if method == "POST" else {}
                return await answer(request, session, body)
            except RequestRefused as error:
                self.counts[error.reason] += 1
                return JSONResponse(dialect.error(error), status_code=error.status)
            except ClientDisconnect:
                self.counts["disconnected"] += 1
                return Response(status_code=499)

        return Route(path, endpoint, methods=[method])

    def _session(self, request: HttpRequest) -> Session:
        header = request.headers.get("authorization", "")
        key = request.path_params.get("key") or request.headers.get("x-api-key") or header.removeprefix("Bearer ")
        name = _session_name(key.strip())
        session = self._sessions.get(name)
        session_key = session.key if session else self._ended_keys.get(name, "")
        # The name in the key is public; the whole key is compared in constant time.
        if not secrets.compare_digest(session_key.encode(), key.strip().encode()) or not session_key:
            raise RequestRefused(401, "invalid_api_key", "no run has this key", "unknown key")
        if session is None:
            raise run_ended()
        return session

    def _generate(self, dialect: Dialect) -> Handler:
        async def answer(request: HttpRequest, session: Session, body: Body) -> Response:
            body, ignored = wire.without(body, session.ignored)
            parsed = dialect.read(body)
            self._note_parameters(
                wire.sampling_of(body), "sampling parameters left out", "the run sets the sampling parameters"
            )
            self._note_parameters(ignored, "ignored parameters left out", "environment.ignored names it")
            self._note_parameters(wire.unknown(body), "unknown parameters left out", "the endpoint does not know it")
            # The clients of OpenAI and Anthropic send this header when they repeat a request.
            again = request.headers.get("x-stainless-retry-count", "0") != "0"
            return _TurnResponse(dialect, session, session.begin_all(parsed, again=again), body)

        return answer

    def _note_parameters(self, names: Sequence[str], counter: str, why: str) -> None:
        for name in names:
            self.counts[counter] += 1
            if name not in self._logged_parameters and len(self._logged_parameters) < NOTED:
                self._logged_parameters.add(name)
                log.info("agents set %s: it is ignored, because %s", name[:100], why)


class _TurnResponse(Response):
    """Sends a request's turns when all have ended, or its only turn as a stream; records whether they arrived."""

    def __init__(self, dialect: Dialect, session: Session, turns: Sequence[Turn], body: Body) -> None:
        super().__init__()
        self._dialect, self._session, self._turns, self._body = dialect, session, turns, body
        self._model = str(body.get("model") or wire.MODEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hangup, delivered = asyncio.create_task(_wait_for_hangup(receive)), False
        try:
            sender = self._stream if self._body.get("stream") is True else self._send_ended
            delivered = await sender(scope, send, hangup)
        except OSError:
            # The connection broke during a write.
            pass
        finally:
            hangup.cancel()
            for turn in self._turns:
                self._session.leave(turn, delivered=delivered)

    async def _send_ended(self, scope: Scope, send: Send, hangup: "asyncio.Task[None]") -> bool:
        running = {turn.task for turn in self._turns if turn.task}
        while running and not hangup.done():
            running &= (await asyncio.wait({*running, hangup}, return_when=asyncio.FIRST_COMPLETED))[1]
        # In one round of the event loop, `hangup` ends if the client has hung up meanwhile.
        await asyncio.sleep(0)
        if hangup.done():
            return False
        return await self._send_at_once(scope, send, hangup)

    async def _send_at_once(self, scope: Scope, send: Send, hangup: "asyncio.Task[None]") -> bool:
        if fault := next((turn.error for turn in self._turns if turn.error is not None), None):
            error = _refusal_of(fault)
            response = JSONResponse(self._dialect.error(error), status_code=error.status)
        else:
            response = JSONResponse(self._dialect.complete(self._turns, self._model))
        await response(scope, _read_nothing, send)
        return fault is None

    async def _stream(self, scope: Scope, send: Send, hangup: "asyncio.Task[None]") -> bool:
        (turn,) = self._turns
        await asyncio.wait([turn.admitted, hangup], return_when=asyncio.FIRST_COMPLETED)
        if hangup.done():
            return False
        if turn.error is not None:
            return await self._send_at_once(scope, send, hangup)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        stream = self._dialect.stream(turn, self._model, self._body)
        await _send(send, stream.begin())
        while turn.reply is None and turn.error is None:
            turn.changed.clear()
            await _send(send, stream.extend(turn.partial))
            if not await _wait_for_change(turn, hangup):
                await _send(send, self._dialect.keep_alive)
            if hangup.done():
                return False
        if turn.error is not None:
            await _send(send, wire.event(self._dialect.error(_refusal_of(turn.error)), "error"), last=True)
            return False
        last_events = stream.end(turn)
        await asyncio.sleep(0)
        if hangup.done():
            return False
        await _send(send, last_events, last=True)
        return True


class _Server(uvicorn.Server):
    """A server that installs no signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _wait_for_change(turn: Turn, hangup: "asyncio.Task[None]") -> bool:
    """Wait until a turn changes or its client hangs up; False if neither happens within `KEEP_ALIVE_S`."""
    assert turn.task is not None
    changed = asyncio.create_task(turn.changed.wait())
    try:
        done, _ = await asyncio.wait(
            [changed, hangup, turn.task], timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        changed.cancel()
    return bool(done)


async def _wait_for_hangup(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_nothing() -> dict[str, object]:
    """Never return. Takes the place of `receive`, which `hangup` already awaits."""
    return await asyncio.get_running_loop().create_future()


async def _send(send: Send, body: bytes, *, last: bool = False) -> None:
    if body or last:
        await send({"type": "http.response.body", "body": body, "more_body": not last})


async def _body(request: HttpRequest) -> Body:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > BODY_BYTES:
            message = f"a request has at most {BODY_BYTES // 2**20} MiB"
            raise RequestRefused(413, "request_too_large", message, "too large a body")
        parts.append(part)
    try:
        value = json_values.plain(json_values.read(b"".join(parts)))
    except ValueError as error:
        raise malformed(f"the body is not JSON: {error}", "broken JSON") from error
    if not isinstance(value, dict):
        raise malformed("the body is not a JSON object", "broken JSON")
    return value


def _count_tokens(dialect: Dialect) -> Handler:
    async def answer(request: HttpRequest, session: Session, body: Body) -> Response:
        try:
            return JSONResponse({"input_tokens": session.count(dialect.read(body))})
        except TaskError as error:
            raise malformed(str(error)) from error

    return answer


async def _add_reward(request: HttpRequest, session: Session, body: Body) -> Response:
    try:
        reward = number(body.get("reward"))
    except ValueError as error:
        raise malformed(f"reward is {body.get('reward')!r}, {error}", "reward that is not a number") from error
    name = body.get("response_id") or ""
    session.add_reward(reward, str(name))
    return JSONResponse({"reward": reward, "response_id": name or None})


async def _list_models(request: HttpRequest, session: Session, body: Body) -> Response:
    return JSONResponse({"object": "list", "data": [_model_entry(wire.MODEL)], "has_more": False})


async def _describe_model(request: HttpRequest, session: Session, body: Body) -> Response:
    return JSONResponse(_model_entry(request.path_params["name"]))


def _model_entry(name: str) -> Body:
    return {"id": name, "object": "model", "created": 0, "owned_by": "streamppo", "type": "model", "display_name": name}


def _refusal_of(error: Exception) -> RequestRefused:
    return (
        error if isinstance(error, RequestRefused) else RequestRefused(500, "server_error", str(error), "engine failed")
    )


def _session_name(key: str) -> str:
    """Return the public part of a key, which is the name of its session."""
    parts = key.split("-", 2)
    return parts[1] if len(parts) == 3 and parts[0] == "sp" else ""


def reachable(host: str) -> str:
    """Return an address at which other machines reach `host`; for a wildcard, that of the default route."""
    if host not in ("0.0.0.0", "::"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing.
            probe.connect(("192.0.2.1", 9))
            return cast(str, probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
