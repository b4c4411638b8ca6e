"""The `[task]` part of the configuration: the source of prompts. docs/rewards.md has examples."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

from streamppo.config.base import Count, Fraction, Kind, Positive, PositiveFloat, Seconds, Section, Timed

ControlTokens: TypeAlias = Literal["text", "parse"]
Arguments: TypeAlias = dict[str, str | int | float | bool]
MOST_SUMS = 1_000_000
"""Maximum number of problems of an addition task; all of them are held in memory."""


class Addition(Kind, frozen=True):
    """Problems that ask for the sum of two numbers."""

    first: tuple[Count, Count] = (10, 99)
    """[smallest, largest] first number."""
    second: tuple[Count, Count] = (10, 99)
    """[smallest, largest] second number."""
    held_out: Fraction = 0.1
    """Share of the problems for evaluation only."""

    def contradictions(self) -> Iterator[str]:
        # A run makes all problems at its start.
        sums = math.prod(last - first + 1 for first, last in (self.first, self.second))
        if sums > MOST_SUMS:
            yield f"first {self.first} and second {self.second} have {sums:,} sums, more than {MOST_SUMS:,}"


class ArithmeticTask(Addition, frozen=True, tag="arithmetic"):
    """Addition: the prompt "12+34=" has the answer "46"."""


class HeldOut(Section, frozen=True):
    """Tasks whose rows are split into training and evaluation."""

    held_out: Fraction = 0.05
    """Share of the distinct prompts for evaluation only, if no evaluation data are named."""


class Source(HeldOut, frozen=True, kw_only=True):
    """One data set, and how its rows become prompts. A column's name may be dotted: `reward_model.ground_truth`."""

    data: str
    """A jsonl, json, csv or parquet file, a folder, or a hub name (extra `data`)."""
    subset: str = ""
    """Configuration of a hub data set, or a subfolder of `data`."""
    split: str = "train"
    """Split for training."""
    evaluation: str | None = None
    """Data of the held-out prompts; by default `data`."""
    evaluation_split: str | None = None
    """Split for evaluation."""
    prompt: str = "prompt"
    """Column of the prompt: a string, or messages with role and content."""
    answer: str = "answer"
    """Column that scorers get as `answer`; "" is none. If it is also the prompt's column, its last message is the
    answer."""
    columns: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Further columns for scorers, `name = "column"`; an `answer` replaces the field `answer`."""
    chat: bool = False
    """Turn a string prompt into a user message."""
    system: str = ""
    """System message; string prompts become user messages."""
    tools: str = "tools"
    """Column of the tools as JSON schemas; "" is none."""
    template: Arguments = msgspec.field(default_factory=Arguments)
    """Arguments of the chat template; a row's `chat_template_kwargs` override them."""
    control_tokens: ControlTokens = "text"
    """A control token's name in a row, such as <|im_end|>, becomes text, or ("parse") the token."""
    max_prompt_tokens: Positive = 1024
    """Maximum tokens of a prompt."""
    too_long: Literal["error", "skip", "truncate"] = "error"
    """For a prompt above `max_prompt_tokens`: raise an error, skip its row, or keep only its last tokens."""
    weight: PositiveFloat = 1.0
    """Share of the training prompts, relative to other data sets."""


class DataTask(Kind, frozen=True, tag="data"):
    """Rows of one or several data sets. In a file, `[task] data = ...` is short for `[task.sources.data]`."""

    sources: dict[str, Source] = msgspec.field(default_factory=dict[str, Source])
    """Data sets by name, mixed by weight. A scorer's `sources` selects by these names, or by a row's data_source."""

    def contradictions(self) -> Iterator[str]:
        if not self.sources:
            yield "a data task needs `data`, or tables `[task.sources.NAME]` that each have `data`"


class GymTask(HeldOut, frozen=True, kw_only=True, tag_field="kind", tag="reasoning_gym"):
    """A procedural data set of reasoning-gym (extra `gym`); its scorer is `streamppo.tasks.library.gym:score`."""

    dataset: str
    """Name of the data set, such as "chain_sum"."""
    parameters: Arguments = msgspec.field(default_factory=Arguments)
    """Parameters of the data set, such as max_digits."""
    size: Positive = 10_000
    """Number of problems."""
    suffix: str = ""
    """Appended to every question."""


class CalculatorTask(Addition, frozen=True, tag="calculator"):
    """Addition with a calculator, for the environment `streamppo.tasks.library.calculator:Calculator`."""


class VerifiersTask(HeldOut, frozen=True, kw_only=True, tag_field="kind", tag="verifiers"):
    """Tasks of a verifiers environment (extra `verifiers`), for the agent `streamppo.tasks.library.verifiers:run`."""

    environment: str
    """Id of the environment's taskset, or a TOML file with an `[env]` table."""
    rows: Positive = 10_000
    """Maximum number of tasks that are read."""


Task = ArithmeticTask | DataTask | GymTask | CalculatorTask | VerifiersTask


class Conversation(Timed, frozen=True, kw_only=True):
    """Fields of every environment: bounds on turns, and how messages become tokens."""

    template: Arguments = msgspec.field(default_factory=Arguments)
    """Further arguments of the chat template for the environment's messages."""
    control_tokens: ControlTokens = "text"
    """A control token's name in the environment's texts becomes text, or ("parse") the token."""
    max_turns: Positive = 8
    """Maximum turns, or requests of an agent."""
    max_tokens: Positive = 4096
    """Maximum tokens of all turns and observations together."""


class Environment(Conversation, frozen=True, kw_only=True, tag_field="kind", tag="class"):
    """Trajectories of several turns: an environment answers each turn of the policy until it is done."""

    name: str
    """A class; each trajectory has an instance."""
    arguments: Arguments = msgspec.field(default_factory=Arguments)
    """Keyword arguments of the class's constructor."""

    @property
    def module(self) -> str:
        """The name of the environment's class."""
        return self.name


class BubblewrapSandbox(Kind, frozen=True, tag="bubblewrap"):
    """The program can read /usr, Python and `files`. The program has no network except its endpoint."""

    files: tuple[str, ...] = ()
    """Files and folders that the program may read."""
    memory_mib: Positive = 1024
    """Memory limit of all processes together."""
    disk_mib: Positive = 64
    """Maximum size of the program's scratch folder."""


class CustomSandbox(Kind, frozen=True, kw_only=True, tag="class"):
    """A custom sandbox, such as a remote service: a class with `async def run(self, program) -> Ran`."""

    name: str
    """A class."""
    arguments: Arguments = msgspec.field(default_factory=Arguments)
    """Keyword arguments of the class's constructor."""


AnySandbox: TypeAlias = BubblewrapSandbox | CustomSandbox


class AgentEnvironment(Conversation, frozen=True, kw_only=True, tag_field="kind", tag="agent"):
    """Trajectories of several turns: the user's program calls an OpenAI-compatible endpoint, and the policy answers."""

    agent: str = ""
    """A function that is called once for each trajectory."""
    command: tuple[str, ...] = ()
    """A program and its arguments, instead of `agent`."""
    sandbox: AnySandbox | None = None
    """The sandbox in which `command` runs. By default `command` runs with the user's rights."""
    host: str = "127.0.0.1"
    """Address on which the endpoint listens."""
    ignored: tuple[Literal["response_format", "tool_choice", "tools"], ...] = ()
    """Parameters of requests that are ignored; by default such requests are refused (`tools` only if the chat template
    leaves them out)."""
    timeout_s: Seconds = 600.0
    """Time limit of an agent's run; a longer run fails its trajectory."""

    @property
    def module(self) -> str:
        """The name of the agent's function; "" for a program."""
        return self.agent

    def contradictions(self) -> Iterator[str]:
        if bool(self.agent) == bool(self.command):
            yield (
                'an agent is a function, agent = "mine.py:run", or a program, command = ["python", "agent.py"]: give '
                "one of them"
            )
        if self.sandbox is not None and not self.command:
            yield "sandbox is for a program: give command = [...]; a function runs in a process of the run"

    def refuses(self, linear: Sequence[str]) -> Iterator[str]:
        """Yield a sentence for each setting in `linear`, because an agent's requests may branch."""
        for choice in linear:
            yield f"{choice} does not support branches, which an agent's run may have: leave it out"


AnyEnvironment: TypeAlias = Environment | AgentEnvironment
