"""The sandboxes of examples/sandboxes, against doubles of their libraries: none of the services is asked.

Each call that they make is put to the signature of the real library where it is installed.
"""

import asyncio
import importlib
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import REPOSITORY

from streamppo.config.task import CustomSandbox
from streamppo.tasks import agent_sandbox
from streamppo.tasks.agent_sandbox import AgentProgram, AgentSandbox
from streamppo.tasks.scorers.capture import Ran

ADDRESS = "http://10.0.0.5:4711"
SERVICES = {"docker": "Docker", "e2b": "E2B", "modal": "Modal"}
LAST = '{"reward": 1.0}\n'


class Late(Exception):
    """In place of the error by which a library says that a command took too long."""


class Ended(Exception):
    """In place of E2B's error for an exit code."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


class Service:
    """What a double does, and what it was asked: names of the real library's functions, with their arguments."""

    def __init__(self) -> None:
        self.code: int | None = 0
        self.hangs = self.hanging = False
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    async def hang(self) -> None:
        if self.hangs:
            self.hanging = True
            await asyncio.sleep(60)

    def note(self, name: str, result: Any = None) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            return result(*arguments, **named) if callable(result) else result

        return call

    def anote(self, name: str, result: Any = None) -> Callable[..., Any]:
        made = self.note(name)

        async def call(*arguments: Any, **named: Any) -> Any:
            made(*arguments, **named)
            return await result(*arguments, **named) if callable(result) else result

        return call

    def asked(self, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (found,) = [(arguments, named) for called, arguments, named in self.calls if called == name]
        return found


def on_docker(service: Service) -> dict[str, ModuleType]:
    run, one = "docker.models.containers:ContainerCollection.run", "docker.models.containers:Container"

    def wait(timeout: float) -> dict[str, int]:
        if service.code is None:
            raise Late
        return {"StatusCode": service.code}

    def logs(stdout: bool, stderr: bool, tail: int) -> bytes:
        return LAST.encode() if stdout else b"oh"

    container = SimpleNamespace(
        wait=service.note(f"{one}.wait", wait),
        logs=service.note(f"{one}.logs", logs),
        remove=service.note(f"{one}.remove"),
    )
    client = SimpleNamespace(containers=SimpleNamespace(run=service.note(run, container)))
    errors = module("requests.exceptions", ConnectionError=Late, ReadTimeout=Late)
    types = module("docker.types", LogConfig=service.note("docker.types:LogConfig"))
    return {
        "docker": module("docker", from_env=lambda: client, types=types),
        "docker.types": types,
        "requests.exceptions": errors,
    }


def on_e2b(service: Service) -> dict[str, ModuleType]:
    async def run(command: str, on_stdout: Any, on_stderr: Any, timeout: float, **_: Any) -> Any:
        on_stdout(LAST)
        on_stderr("oh")
        await service.hang()
        if service.code is None:
            raise Late
        if service.code:
            raise Ended(service.code)
        return SimpleNamespace(exit_code=0)

    sandbox = SimpleNamespace(
        files=SimpleNamespace(
            write_files=service.anote("e2b.sandbox_async.filesystem.filesystem:Filesystem.write_files")
        ),
        commands=SimpleNamespace(run=service.anote("e2b.sandbox_async.commands.command:Commands.run", run)),
        kill=service.anote("e2b:AsyncSandbox.kill"),
    )
    made = SimpleNamespace(create=service.anote("e2b:AsyncSandbox.create", sandbox))
    return {"e2b": module("e2b", AsyncSandbox=made, CommandExitException=Ended, TimeoutException=Late)}


def on_modal(service: Service) -> dict[str, ModuleType]:
    async def output(text: str) -> AsyncIterator[str]:
        yield text
        await service.hang()

    async def wait(**_: Any) -> None:
        if service.code is None:
            raise Late

    def aio(name: str, result: Any = None) -> SimpleNamespace:
        return SimpleNamespace(aio=service.anote(name, result))

    sandbox = SimpleNamespace(
        stdout=output(LAST),
        stderr=output("oh"),
        returncode=service.code,
        wait=aio("modal:Sandbox.wait", wait),
        terminate=aio("modal:Sandbox.terminate"),
    )
    image = SimpleNamespace(add_local_dir=service.note("modal:Image.add_local_dir"))
    errors = module("modal.exception", SandboxTimeoutError=Late)
    made = module(
        "modal",
        App=SimpleNamespace(lookup=aio("modal:App.lookup")),
        Image=SimpleNamespace(from_registry=service.note("modal:Image.from_registry", image)),
        Sandbox=SimpleNamespace(create=aio("modal:Sandbox.create", None)),
        Secret=SimpleNamespace(from_dict=service.note("modal:Secret.from_dict")),
        exception=errors,
    )

    async def create(*_: Any, **__: Any) -> Any:
        sandbox.returncode = service.code
        return sandbox

    made.Sandbox.create = aio("modal:Sandbox.create", create)  # pyright: ignore
    return {"modal": made, "modal.exception": errors}


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names)
    return made


DOUBLES = {"docker": on_docker, "e2b": on_e2b, "modal": on_modal}
ENDS = {
    "docker": "docker.models.containers:Container.remove",
    "e2b": "e2b:AsyncSandbox.kill",
    "modal": "modal:Sandbox.terminate",
}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[AgentSandbox, Service]]:
    """A sandbox of a service as the configuration names it, over the double of its library."""
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "agent.py").write_text("print(1)")
    monkeypatch.chdir(folder)

    def make(name: str) -> tuple[AgentSandbox, Service]:
        service = Service()
        for called, double in DOUBLES[name](service).items():
            monkeypatch.setitem(sys.modules, called, double)
        # A file is loaded once.
        file = tmp_path / f"on_{name}.py"
        file.write_text((REPOSITORY / "examples" / "sandboxes" / file.name).read_text())
        config = CustomSandbox(name=f"{file}:{SERVICES[name]}", arguments={"folder": str(folder)})
        return agent_sandbox.build(config), service

    return make


PROGRAM = AgentProgram(
    ("python", "agent.py"),
    {"OPENAI_BASE_URL": f"{ADDRESS}/v1", "OPENAI_API_KEY": "sp-1-x"},
    ADDRESS,
    5.0,
)


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("code", [0, 3, None])
def test_a_service_says_how_a_program_ended_and_keeps_nothing_of_it(
    name: str, code: int | None, opened: Callable[..., tuple[AgentSandbox, Service]]
) -> None:
    sandbox, service = opened(name)
    service.code = code
    ran = asyncio.run(sandbox.run(PROGRAM))
    assert ran.exit_code == code
    assert code is None or ran == Ran(code, LAST, "oh")
    service.asked(ENDS[name])


@pytest.mark.parametrize("name", ["e2b", "modal"])
def test_a_program_whose_run_is_over_is_ended_at_the_service(
    name: str, opened: Callable[..., tuple[AgentSandbox, Service]]
) -> None:
    async def main() -> None:
        running = asyncio.create_task(sandbox.run(PROGRAM))
        while not service.hanging:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])

    sandbox, service = opened(name)
    service.hangs = True
    asyncio.run(main())
    service.asked(ENDS[name])


def test_each_service_gets_the_programs_words_variables_files_and_limits(
    opened: Callable[..., tuple[AgentSandbox, Service]], tmp_path: Path
) -> None:
    """Each ends by itself if the actor cannot end it."""
    folder, asked = str(tmp_path / "program"), dict[str, Service]()
    file = f"{folder}/agent.py"
    for name in SERVICES:
        sandbox, asked[name] = opened(name)
        asyncio.run(sandbox.run(PROGRAM))
    (_, words), given = asked["docker"].asked("docker.models.containers:ContainerCollection.run")
    assert words == ["timeout", "--signal=KILL", "15", "python", file]
    assert given["environment"] == PROGRAM.variables and given["mem_limit"] == "1024m"
    assert given["volumes"] == {folder: {"bind": folder, "mode": "ro"}}
    (command,), given = asked["e2b"].asked("e2b.sandbox_async.commands.command:Commands.run")
    assert (command, given["envs"], given["timeout"]) == (f"python {file}", PROGRAM.variables, 5.0)
    (files,), _ = asked["e2b"].asked("e2b.sandbox_async.filesystem.filesystem:Filesystem.write_files")
    assert files == [{"path": file, "data": b"print(1)"}]
    assert asked["e2b"].asked("e2b:AsyncSandbox.create")[1]["timeout"] == 15
    words, given = asked["modal"].asked("modal:Sandbox.create")
    assert words == ("python", file) and (given["timeout"], given["memory"]) == (15, 1024)
    assert asked["modal"].asked("modal:Secret.from_dict")[0] == (PROGRAM.variables,)
    assert asked["modal"].asked("modal:Image.add_local_dir")[0] == (folder, folder)


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_asked_of_a_service_fits_its_library(
    name: str, opened: Callable[..., tuple[AgentSandbox, Service]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    sandbox, service = opened(name)
    asyncio.run(sandbox.run(PROGRAM))
    for called in DOUBLES[name](Service()):
        monkeypatch.delitem(sys.modules, called)
    assert len(service.calls) >= 4
    for called, arguments, named in service.calls:
        place, names = called.split(":")
        found: Any = importlib.import_module(place)
        for part in names.split("."):
            found = getattr(found, part)
        signature = inspect.signature(found)
        itself = [None] if "self" in [*signature.parameters][:1] else []
        signature.bind(*itself, *arguments, **named)
