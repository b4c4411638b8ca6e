"""A program of an agent in a sandbox: it reaches its endpoint and nothing else, and each limit has its sentence."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agent_case
import psutil
import pytest
from agent_case import Speaks
from conftest import REPOSITORY, SUPPORT

from streamppo.commands.checks import task as checks
from streamppo.config.sections import Config
from streamppo.config.task import AgentEnvironment, AnySandbox, BubblewrapSandbox, CustomSandbox
from streamppo.errors import EnvironmentFailed, TaskError
from streamppo.rollout.engine import Sampling
from streamppo.rollout.episode import Episode
from streamppo.rollout.player import Player
from streamppo.tasks import agent_sandbox
from streamppo.tasks.agent_sandbox import AgentBubblewrap, AgentProgram
from streamppo.tasks.scorers import bubblewrap
from streamppo.tasks.scorers.capture import Ran
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Prompt

walled = pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "bubblewrap works")
FILE = str(SUPPORT / "walled_program.py")
SANDBOX = SUPPORT / "sandbox_elsewhere.py"
PROMPT = Prompt(text="1+2", columns={"answer": "hi"})
SEEN = BubblewrapSandbox(files=(FILE,), memory_mib=256)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return agent_case.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def play(tokenizer: Tokenizer) -> Callable[..., list[Episode]]:
    """Play a program once, or several times at once."""

    def played(*words: str, sandbox: AnySandbox = SEEN, times: int = 1, **limits: Any) -> list[Episode]:
        config = AgentEnvironment(command=("python", FILE, *words), sandbox=sandbox, timeout_s=limits.pop("s", 60.0))

        async def main() -> list[Episode]:
            player = Player(Speaks(tokenizer, lambda _: "hi"), tokenizer, config, scored=False)  # pyright: ignore
            try:
                return await asyncio.gather(*(player.play(PROMPT, Sampling(32)) for _ in range(times)))
            finally:
                assert player.agents is not None
                await player.agents.close()

        return asyncio.run(main())

    return played


def failure(play: Callable[..., list[Episode]], *words: str, **options: Any) -> tuple[str, int]:
    with pytest.raises(EnvironmentFailed) as caught:
        play(*words, **options)
    return str(caught.value), caught.value.tokens


# --- what it reaches -----------------------------------------------------------------------------------------


@walled
def test_a_program_in_a_sandbox_asks_its_endpoint_and_its_last_line_is_its_reward(
    play: Callable[..., list[Episode]], tokenizer: Tokenizer
) -> None:
    for episode in play("endpoint: ", times=3):
        assert episode.turn_rewards == (0.0, 1.0) and episode.end.components == {"said": 1.0, "endpoint: ": 1.0}
        assert tokenizer.spell(episode.tokens[episode.mask].tolist()) == "hi<eos>hi<eos>"


@walled
def test_a_program_in_a_sandbox_reaches_nothing_of_the_machine_but_its_files_and_scratch_folder(
    play: Callable[..., list[Episode]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINERS_KEY", "secret")
    (tmp_path / "id_rsa").write_text("secret")
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as nameless:
        tcp.bind(("0.0.0.0", 0))
        named.bind(str(tmp_path / "raylet.sock"))
        nameless.bind("\0streamppo-test-walled")
        for one in (tcp, named, nameless):
            one.listen()
        shut = [
            *[("port", f"{tcp.getsockname()[1]}"), ("address", own_address()), ("address", "8.8.8.8")],
            *[("socket", f"{tmp_path / 'raylet.sock'}"), ("socket", "@streamppo-test-walled")],
            *[
                ("file", f"{tmp_path / 'id_rsa'}"),
                ("file", f"{REPOSITORY / 'pyproject.toml'}"),
                ("file", "/etc/passwd"),
            ],
            *[("write", FILE), ("write", "/usr/new.txt"), ("write", "/new.txt")],
            *[("variable", "TRAINERS_KEY"), ("process", f"{os.getpid()}"), ("root", "")],
        ]
        opened = [("write", "/tmp/new.txt"), ("write", "new.txt"), ("file", FILE), ("endpoint", "")]
        # In a repository below /tmp this path is in the scratch folder.
        beside = SUPPORT / "new.txt"
        (opened if beside.is_relative_to("/tmp") else shut).append(("write", f"{beside}"))
        # A word of a command that names a file which the sandbox does not see is refused: these are in longer words.
        (episode,) = play(*(f"{what}: {value}" for what, value in (*shut, *opened)))
    found = {name: value for name, value in episode.end.components.items() if name != "said"}
    assert found == {f"{what}: {value}": float((what, value) in opened) for what, value in (*shut, *opened)}
    assert not beside.exists()


def own_address() -> str:
    """An address of this machine that is not loopback's, if it has one."""
    found = [one.address for all_ in psutil.net_if_addrs().values() for one in all_ if one.family == socket.AF_INET]
    return next((one for one in found if not one.startswith("127.")), "10.0.0.1")


# --- its limits ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@walled
@pytest.mark.parametrize(
    ("word", "said"),
    [
        (f"memory: {2**29}", "MemoryError: all its processes together had more than 256 MiB"),
        ("processes: 200", "BlockingIOError"),
        ("raise: ", "ValueError: what went wrong"),
        ("print: ", "the agent ended with exit code"),
    ],
)
def test_a_program_that_passes_a_limit_fails_with_its_sentence(
    word: str, said: str, play: Callable[..., list[Episode]]
) -> None:
    reason, tokens = failure(play, word)
    assert said in reason and tokens == 3


@pytest.mark.slow
@walled
def test_a_program_that_takes_too_long_is_killed_with_all_of_its_sandbox(play: Callable[..., list[Episode]]) -> None:
    reason, tokens = failure(play, "time: 617", s=2.0)
    assert (reason, tokens) == ("the agent took longer than 2 s (environment.timeout_s)", 3)
    wait_until(lambda: not left("time: 617"))


@walled
def test_a_program_that_cannot_be_started_is_named(tokenizer: Tokenizer) -> None:
    ran = asyncio.run(AgentBubblewrap(SEEN).run(AgentProgram(("nothing",), {}, "http://127.0.0.1:49999", 5.0)))
    assert ran == Ran(1, "", "'nothing' cannot be started: [Errno 2] No such file or directory\n")


ACTOR = """
import asyncio, sys
sys.path[:0] = {path!r}
import agent_case
from pathlib import Path
from streamppo.config.task import AgentEnvironment, BubblewrapSandbox
from streamppo.rollout.engine import Sampling
from streamppo.rollout.player import Player
from streamppo.types import Prompt

async def main():
    tokenizer = agent_case.tokenizer(Path(sys.argv[1]))
    command = ("sh", "-c", "setsid sleep 618 & sleep 618")
    player = Player(agent_case.Speaks(tokenizer, str), tokenizer,
                    AgentEnvironment(command=command, sandbox=BubblewrapSandbox()))
    await asyncio.gather(*(player.play(Prompt(text="a", columns={{}}), Sampling(9)) for _ in range(2)))

asyncio.run(main())
"""


@pytest.mark.slow
@walled
def test_sandboxes_end_with_their_actor(tmp_path: Path) -> None:
    code = ACTOR.format(path=[str(SUPPORT), str(SUPPORT.parent)])
    actor = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        wait_until(lambda: len(left("618")) >= 4)
    finally:
        actor.kill()
        actor.wait()
    wait_until(lambda: not left("618"))


def left(word: str) -> list[psutil.Process]:
    """Processes with a word in their command that live on."""
    running = psutil.process_iter(["cmdline", "status"])
    return [
        one for one in running if word in (one.info["cmdline"] or ()) and one.info["status"] != psutil.STATUS_ZOMBIE
    ]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- sandboxes of others -------------------------------------------------------------------------------------


def elsewhere(answer: str) -> CustomSandbox:
    return CustomSandbox(name=f"{SANDBOX}:Elsewhere", arguments={"answer": answer})


def test_a_sandbox_of_the_users_runs_the_program(play: Callable[..., list[Episode]]) -> None:
    assert [one.turn_rewards for one in play("endpoint: ", sandbox=elsewhere("ran"))] == [(0.0, 1.0)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("raises", "the agent's sandbox: sandbox_elsewhere.py:"),
        ("late", "the agent took longer than 1 s (environment.timeout_s)"),
        ("nothing", "the agent's sandbox returned None, not a `Ran`"),
    ],
)
def test_a_sandbox_of_the_users_that_fails_has_its_sentence(
    answer: str, said: str, play: Callable[..., list[Episode]]
) -> None:
    reason, tokens = failure(play, "endpoint: ", sandbox=elsewhere(answer), s=1.0 if answer == "late" else 60.0)
    assert reason.startswith(said) and tokens == 0


# --- what check says -----------------------------------------------------------------------------------------


@walled
@pytest.mark.parametrize(
    ("command", "sandbox", "said"),
    [
        (f'["python", "{FILE}"]', f'{{ kind = "bubblewrap", files = ["{SUPPORT}"] }}', ""),
        (f'["python", "{FILE}"]', '"bubblewrap"', "walled_program.py', which its sandbox lacks: add it"),
        ('["no-such-program"]', '"bubblewrap"', "begins with 'no-such-program', which its sandbox lacks"),
        (f'["{FILE}"]', '"bubblewrap"', "walled_program.py', which its sandbox lacks: add it"),
        ('["python"]', '{ kind = "bubblewrap", files = ["nowhere"] }', "nowhere', which is not a file or folder here"),
        ('["python"]', '{ kind = "class", name = "nowhere:Box" }', "environment.sandbox 'nowhere:Box'"),
        ('["python"]', f'{{ kind = "class", name = "{SANDBOX}:Elsewhere", arguments = {{ a = 1 }} }}', "argument 'a'"),
    ],
)
def test_check_finds_what_a_sandbox_lacks(
    command: str, sandbox: str, said: str, math_config: Callable[..., Config]
) -> None:
    config = math_config(f"environment={{ command = {command}, sandbox = {sandbox} }}")
    (found,) = checks.environment(config)
    assert (found.state, said in found.text) == ("error" if said else "ok", True), found.text


def test_without_bubblewrap_the_sandbox_is_refused_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap.problem.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        with pytest.raises(TaskError, match=r"apt-get install bubblewrap.*environment\.sandbox"):
            agent_sandbox.build(BubblewrapSandbox())
    finally:
        bubblewrap.problem.cache_clear()
