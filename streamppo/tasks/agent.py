"""Runs agents: users' functions and programs that call the run's endpoint. Agents run in processes that can be killed.

    async def run(prompt, base_url, api_key, **columns)     a function of yours, `def` or `async def`
    ["python", "agent.py"]                                  a program, with the endpoint in its environment

A function gets only the arguments that it has parameters for. `prompt` is a text, or a list of messages. A parameter
`data` gets a dict of the prompt and all columns. Of a class, each process calls the method `run` of one instance, as
AReaL does. The environment of functions and programs has OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
ANTHROPIC_API_KEY and STREAMPPO_PROMPT. A function returns a number, a `Reward`, a `Done`, or None if a scorer gives the
reward. A program may print {"reward": 1.0} as its last line.

Agents run in the processes of reward functions (tasks/rewards/processes), which return a `Reward`. The result of a run,
an `AgentOutcome`, is sent as JSON in the explanation of this `Reward`.
"""

import asyncio
import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from streamppo.config.task import AgentEnvironment, AnySandbox
from streamppo.errors import TaskError
from streamppo.tasks import agent_sandbox, plugins, user_traceback
from streamppo.tasks.agent_sandbox import AgentProgram
from streamppo.tasks.coroutines import TooLate, within
from streamppo.tasks.environments import Done
from streamppo.tasks.rewards.outcome import plain
from streamppo.tasks.rewards.processes import reaper
from streamppo.tasks.scorers.capture import Ran
from streamppo.types import Reward, ScoredText, WireStruct, utf8_safe

CALL = "streamppo/call"
"""The column with the JSON of an `AgentCall`."""
TAIL = 2**16
"""Maximum number of characters kept from the end of a run's output."""
QUOTED = 1000
"""Number of characters from the end of the output that a failure quotes."""
MANY_MODULES = 50
"""If a function imports at least so many modules while it runs, the import takes a noticeable part of the run."""
ENDING_S = 1.0
"""Seconds to wait for a run's remaining tasks to end after their cancellation."""
RUN_PARAMETERS = ("prompt", "base_url", "api_key")
"""Parameters of an agent's function that are not columns of the row."""

DATA = "data"
"""The parameter that gets the prompt and all columns, unless a column has its name."""


class TimedOut(NamedTuple):
    """The result of a run that took too long; `place` ("file:line") is the line that waited, if known."""

    place: str = ""


class AgentCall(WireStruct, frozen=True):
    """One run: the address of the endpoint without /v1, the key of its session, and its time limit."""

    address: str
    key: str
    timeout_s: float


class AgentOutcome(WireStruct, frozen=True):
    """The result of a run: its rewards, or the reason for its failure. `score` is None if the agent returned no reward.

    `output` is the end of what the run printed; failures quote it. `lingers` is true if a thread or task of the run
    continues. The process of a lingering run gets no other run, because the thread could read a later run's key.
    `imported` names the largest packages that the function imported while it ran, if it imported `MANY_MODULES`.
    """

    score: float | None = None
    turns: tuple[float, ...] = ()
    components: dict[str, float] = {}  # noqa: RUF012
    explanation: str = ""
    reason: str = ""
    output: str = ""
    lingers: bool = False
    imported: tuple[str, ...] = ()


class Agent:
    """Runs one agent repeatedly: the function `agent`, or the program `command` in `sandbox`, both JSON."""

    def __init__(self, agent: str = "", command: str = "[]", sandbox: str = "null") -> None:
        self._words = msgspec.json.decode(command, type=list[str])
        sandbox_config = msgspec.json.decode(sandbox, type=AnySandbox | None)
        self._sandbox = None if sandbox_config is None else agent_sandbox.build(sandbox_config)
        self._function = load(agent) if agent else None
        self._runner: asyncio.Runner | None = None
        self._threads = _Threads()

    def __call__(self, trajectory: ScoredText, **columns: object) -> Reward:
        """Run the agent on the prompt in `trajectory`. The reward's explanation is the JSON of an `AgentOutcome`."""
        call = msgspec.json.decode(str(columns.pop(CALL)), type=AgentCall)
        if self._runner is None:
            self._runner = asyncio.Runner()
            self._runner.get_loop().set_default_executor(self._threads)
            reaper.adopt_orphans()
        messages = msgspec.json.encode([message.plain() for message in trajectory.messages]).decode()
        environment = variables(call, messages if trajectory.messages else trajectory.prompt)
        os.environ |= environment
        try:
            if self._function is not None:
                outcome = self._run_function(trajectory, call, columns)
            else:
                outcome = self._run_program(call) if self._sandbox is None else self._run_in_sandbox(call, environment)
        finally:
            reaper.end_descendants()
        outcome = structs.replace(outcome, lingers=self._lingers())
        return Reward(explanation=utf8_safe(msgspec.json.encode(outcome).decode()))

    def _lingers(self) -> bool:
        assert self._runner is not None
        others = {*threading.enumerate()} - {threading.current_thread(), *self._threads.idle()}
        return bool(others or asyncio.all_tasks(self._runner.get_loop()))

    # --- a function ------------------------------------------------------------------------------------------

    def _run_function(self, trajectory: ScoredText, call: AgentCall, columns: Mapping[str, object]) -> AgentOutcome:
        assert self._function is not None and self._runner is not None
        prompt = [message.plain() for message in trajectory.messages] if trajectory.messages else trajectory.prompt
        run_arguments: dict[str, object] = {"prompt": prompt, "base_url": f"{call.address}/v1", "api_key": call.key}
        if DATA in inspect.signature(self._function).parameters and DATA not in columns:
            run_arguments[DATA] = {"prompt": prompt, **columns}
        try:
            arguments = _select_arguments(self._function, {**columns, **run_arguments})
        except TaskError as error:
            return AgentOutcome(reason=str(error))
        output, loaded = _Tail(), {*sys.modules}
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                value = plugins.call("the agent", _run, self._runner, self._function, arguments, call.timeout_s)
            outcome = (
                AgentOutcome(reason=timeout_reason(call.timeout_s, value.place))
                if isinstance(value, TimedOut)
                else _outcome(value)
            )
        except TaskError as error:
            outcome = AgentOutcome(reason=str(error))
        return structs.replace(outcome, output=output.quoted(), imported=_packages({*sys.modules} - loaded))

    # --- a program -------------------------------------------------------------------------------------------

    def _run_program(self, call: AgentCall) -> AgentOutcome:
        name = self._words[0]
        try:
            process = subprocess.Popen(
                self._words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except (OSError, ValueError) as error:
            return AgentOutcome(reason=f"the agent {name!r} cannot be started: {error}")
        assert process.stdout is not None and process.stderr is not None
        printed, errors = _Tail(), _Tail()
        threads = [
            threading.Thread(target=tail.follow, args=(pipe,), daemon=True)
            for tail, pipe in ((printed, process.stdout), (errors, process.stderr))
        ]
        for thread in threads:
            thread.start()
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(call.timeout_s)
        # A thread ends when no process has its pipe open, so the program's children must end first.
        reaper.end_descendants()
        for thread in threads:
            thread.join(1.0)
        return _program_outcome(code, call.timeout_s, printed, errors)

    def _run_in_sandbox(self, call: AgentCall, environment: Mapping[str, str]) -> AgentOutcome:
        assert self._sandbox is not None and self._runner is not None
        program = AgentProgram(tuple(self._words), environment, call.address, call.timeout_s)
        try:
            call_arguments = (self._runner, self._sandbox.run, {"program": program}, call.timeout_s)
            ran = plugins.call("the agent's sandbox", _run, *call_arguments)
        except TaskError as error:
            return AgentOutcome(reason=str(error))
        printed, errors, code = _Tail(), _Tail(), None
        if isinstance(ran, Ran):
            printed.write(ran.stdout)
            errors.write(ran.stderr)
            code = ran.exit_code
        elif not isinstance(ran, TimedOut):
            return AgentOutcome(
                reason=f"the agent's sandbox returned {user_traceback.describe(ran)[:QUOTED]}, not a `Ran`"
            )
        return _program_outcome(code, call.timeout_s, printed, errors)


class _Threads(ThreadPoolExecutor):
    """The thread pool of `asyncio.to_thread`, whose threads stay for the next run."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="agent")
        self._under_way = set[Future[Any]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def idle(self) -> Collection[threading.Thread]:
        """Return all threads of the pool if no call is running in the pool; otherwise an empty tuple."""
        return () if self._under_way else self._threads


def _packages(modules: Collection[str]) -> tuple[str, ...]:
    """Return the packages with most of the `modules`, at most three; () if there are fewer than `MANY_MODULES`."""
    packages = Counter(name.partition(".")[0] for name in modules)
    return tuple(name for name, _ in packages.most_common(3)) if len(modules) >= MANY_MODULES else ()


class _Tail(io.TextIOBase):
    def __init__(self) -> None:
        super().__init__()
        self._parts, self._length = list[str](), 0

    @property
    def text(self) -> str:
        return "".join(self._parts)[-TAIL:]

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Append `text`. When more than 2 * `TAIL` characters are stored, keep only the last `TAIL`."""
        self._parts.append(text[-TAIL:])
        self._length += len(self._parts[-1])
        if self._length > 2 * TAIL:
            self._parts = [self.text]
            self._length = TAIL
        return len(text)

    def follow(self, pipe: IO[bytes]) -> None:
        """Append the output of a pipe until its last writer closes it."""
        with pipe:
            while chunk := os.read(pipe.fileno(), TAIL):
                self.write(chunk.decode(errors="replace"))

    def quoted(self) -> str:
        text = self.text.strip()
        return f"; its output ends: {text[-QUOTED:]!r}" if text else ""


def check(config: AgentEnvironment) -> None:
    """Load the agent's function, or make the program's sandbox. Raises `TaskError` if the agent cannot run."""
    if config.agent:
        load(config.agent)
    elif config.sandbox is not None:
        sandbox = agent_sandbox.build(config.sandbox)
        if isinstance(sandbox, agent_sandbox.AgentBubblewrap):
            sandbox.check_command(config.command)


def load(name: str) -> Callable[..., object]:
    """Load an agent's function, or the method `run` of an instance of its class. Raises `TaskError` for other agents.

    A function with positional-only parameters is refused too, because an agent is called with keywords.
    """
    function, subject = plugins.function(name, "environment.agent"), f"environment.agent {name!r}"
    if inspect.isclass(function):
        plugins.check_arguments(function, {}, subject)
        function = getattr(plugins.call(subject, function), "run", None)
        if not callable(function):
            raise TaskError(f"{subject} is a class without a method `run`")
    kinds = plugins.parameters_of(function, subject).values()
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in kinds):
        raise TaskError(f"{subject} has positional-only parameters, but is called with keywords")
    return function


def variables(call: AgentCall, prompt: str) -> dict[str, str]:
    """Return the environment variables that tell a program its endpoint and its prompt."""
    environment = {"OPENAI_BASE_URL": f"{call.address}/v1", "OPENAI_API_KEY": call.key}
    environment |= {"ANTHROPIC_BASE_URL": call.address, "ANTHROPIC_API_KEY": call.key}
    # The agent must call the endpoint directly, not through a proxy of the machine.
    host = urlsplit(call.address).hostname or ""
    direct = [host_name for host_name in os.environ.get("NO_PROXY", "").split(",") if host_name and host_name != host]
    environment |= dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join([*direct, host]))
    return {**environment, "STREAMPPO_PROMPT": prompt.replace("\0", "")}


def timeout_reason(timeout_s: float, place: str = "") -> str:
    """Return the reason for the failure of a run that exceeded its time limit at `place` ("file:line", if known)."""
    where = f", at {place}" if place else ""
    return f"the agent took longer than {timeout_s:g} s (environment.timeout_s){where}"


def _select_arguments(function: Callable[..., object], available: Mapping[str, object]) -> dict[str, object]:
    """Select the arguments that `function` takes. Raises `TaskError` if a required parameter is not available."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {p.name: p.default for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    missing = [name for name, default in named.items() if name not in available and default is inspect.Parameter.empty]
    if missing:
        columns = ", ".join(sorted(available.keys() - set(RUN_PARAMETERS))) or "none"
        raise TaskError(f"the agent asks for the column {missing[0]!r}; columns are {columns}")
    return {name: value for name, value in available.items() if takes_all or name in named}


def _run(
    runner: asyncio.Runner, function: Callable[..., object], arguments: Mapping[str, object], timeout_s: float
) -> object:
    begin = time.monotonic()
    value = function(**arguments)
    if inspect.isawaitable(value):
        return runner.run(_in_time(value, timeout_s))
    return TimedOut() if time.monotonic() - begin > timeout_s else value


async def _in_time(awaitable: Awaitable[object], timeout_s: float) -> object:
    """Await a run, then cancel the run's tasks. Returns a `TimedOut` if the run takes longer than `timeout_s`."""
    try:
        return await within(asyncio.timeout(timeout_s), awaitable)
    except TooLate as error:
        return TimedOut(user_traceback.locate(error))
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=ENDING_S)


def _program_outcome(code: int | None, timeout_s: float, printed: _Tail, errors: _Tail) -> AgentOutcome:
    """Make the outcome of a program. The exit `code` is None if the program exceeded its time limit."""
    if code is None:
        outcome = AgentOutcome(reason=timeout_reason(timeout_s))
    elif code:
        ending = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
        outcome = AgentOutcome(reason=f"the agent {ending}")
    else:
        outcome = _outcome(_last_line(printed.text))
    return structs.replace(outcome, output=errors.quoted() or printed.quoted())


def _last_line(text: str) -> object:
    """Read the reward in a program's last printed line; None if the line is not a JSON object with a `reward`."""
    # `splitlines` would also split at other separators, such as U+2028, which JSON may contain.
    line = re.split(r"[\r\n]", text.strip())[-1]
    try:
        value = json.loads(line) if line else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or "reward" not in value:
        return None
    return Done(value["reward"], value.get("components", {}), str(value.get("explanation", "")))


def _outcome(value: object) -> AgentOutcome:
    match value:
        case None:
            return AgentOutcome()
        case Done():
            reward = Reward(
                score=value.reward,
                components=cast("dict[str, float]", value.components),
                explanation=value.explanation,
            )
        case Reward():
            reward = value
        case _:
            reward = Reward(score=cast(float, value))
    try:
        checked = plain(reward)
    except ValueError as error:
        return AgentOutcome(reason=f"the agent returned {user_traceback.describe(value)[:QUOTED]}, {error}")
    if checked.tokens:
        return AgentOutcome(
            reason="the agent returned rewards of tokens, but has no tokens: return `score` and `turns`"
        )
    return AgentOutcome(
        score=checked.score, turns=checked.turns, components=checked.components, explanation=checked.explanation
    )
