"""The `[task]` part of the configuration: the source of prompts. docs/rewards.md has examples."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

from streamppo.config.base import Count, Fraction, Kind, Positive, PositiveFloat, Seconds, Section, Timed

ControlTokens: TypeAlias = Literal["text", "parse"]
MOST_SUMS = 1_000_000
"""Maximum problems of an addition, all of which are in memory."""


class Addition(Kind, frozen=True):
    """Sums of two numbers."""

    first: tuple[Count, Count] = (10, 99)
    """Range of the first number."""
    second: tuple[Count, Count] = (10, 99)
    """Range of the second number."""
    held_out: Fraction = 0.1
    """Share of the problems for evaluation only."""

    def contradictions(self) -> Iterator[str]:
        """All problems are made when the task is built."""
        sums = math.prod(last - first + 1 for first, last in (self.first, self.second))
        if sums > MOST_SUMS:
            yield f"first {self.first} and second {self.second} have {sums:,} sums, which may be {MOST_SUMS:,} at most"


class ArithmeticTask(Addition, frozen=True, tag="arithmetic"):
    """Procedural addition: "12+34=" asks for "46"."""

    ramp_prompts: Count = 0
    """Curriculum: prompts from the easiest tenth of the problems to all; 0 is off."""


class HeldOut(Section, frozen=True):
    """Rows that are split into training and evaluation."""

    held_out: Fraction = 0.05
    """Share of the distinct prompts for evaluation only, without named evaluation rows."""


class Source(HeldOut, frozen=True, kw_only=True):
    """One data set, and how its rows become prompts. Columns may be dotted: `reward_model.ground_truth`."""

    data: str
    """A jsonl, csv or parquet file, a folder, or a hub name (extra `data`)."""
    subset: str = ""
    """Configuration of a hub data set, or the folder of that name in `data`."""
    split: str = "train"
    """Split for training; a single file is its own split."""
    evaluation: str | None = None
    """Data set of the held-out prompts, if not `data`."""
    evaluation_split: str | None = None
    """Split for evaluation, of a folder or hub name."""
    prompt: str = "prompt"
    """Column of the prompt: a string, or messages with role and content."""
    answer: str = "answer"
    """Column that rewards get as `answer`; "" is none."""
    columns: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Further names of columns for rewards: `name = "column"`; `answer` here overrides the field."""
    chat: bool = False
    """Make a string prompt a user message of the chat template."""
    system: str = ""
    """System message; string prompts then become user messages."""
    tools: str = "tools"
    """Column of tools as JSON schemas; "" is none."""
    template: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict[str, str | int | float | bool])
    """Arguments of the chat template, below a row's `chat_template_kwargs`."""
    control_tokens: ControlTokens = "text"
    """Names of control tokens in rows, such as <|im_end|>, are text, or parsed."""
    max_prompt_tokens: Positive = 1024
    """Longest prompt."""
    too_long: Literal["error", "skip", "truncate"] = "error"
    """For longer prompts: stop, skip the row, or keep its last tokens."""
    weight: PositiveFloat = 1.0
    """Share of the training prompts, relative to others."""


class DataTask(Kind, frozen=True, tag="data"):
    """Rows of a data set, or of several. `[task] data = ...` in a file is short for `[task.sources.data]`."""

    sources: dict[str, Source] = msgspec.field(default_factory=dict[str, Source])
    """Data sets by name, mixed by weight; rewards are selected by these names, or a row's data_source."""

    def contradictions(self) -> Iterator[str]:
        """At least one source."""
        if not self.sources:
            yield "a data task needs `data`, or `[task.sources.NAME]` tables with one each"


class GymTask(HeldOut, frozen=True, kw_only=True, tag_field="kind", tag="reasoning_gym"):
    """A procedural data set of reasoning-gym (extra `gym`); its scorer is `streamppo.tasks.library.gym:score`."""

    dataset: str
    """Its name, such as "chain_sum"."""
    parameters: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict[str, str | int | float | bool])
    """Its parameters, such as max_digits."""
    size: Positive = 10_000
    """Number of problems."""
    suffix: str = ""
    """Appended to every question."""


class CalculatorTask(Addition, frozen=True, tag="calculator"):
    """Addition with a calculator, for the environment `streamppo.tasks.library.calculator:Calculator`."""


class VerifiersTask(HeldOut, frozen=True, kw_only=True, tag_field="kind", tag="verifiers"):
    """Tasks of a verifiers environment (extra `verifiers`), for the agent `streamppo.tasks.library.verifiers:run`."""

    environment: str
    """The id of its taskset, or a TOML file with an `[env]` table."""
    rows: Positive = 10_000
    """Maximum tasks that are read."""


Task = ArithmeticTask | DataTask | GymTask | CalculatorTask | VerifiersTask


class Conversation(Timed, frozen=True, kw_only=True):
    """Fields of every environment: bounds on its turns, and how its messages become tokens."""

    template: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict[str, str | int | float | bool])
    """Further arguments of the chat template for its messages."""
    control_tokens: ControlTokens = "text"
    """Names of control tokens in its texts are text, or parsed."""
    max_turns: Positive = 8
    """Maximum turns of the policy; for an agent, maximum requests."""
    max_tokens: Positive = 4096
    """Maximum tokens of all turns and observations together."""


class Environment(Conversation, frozen=True, kw_only=True, tag_field="kind", tag="class"):
    """Several turns: an environment answers each turn of the policy until it is done."""

    name: str
    """`package.module:Class` or `path/file.py:Class`; an instance for each trajectory."""
    arguments: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict[str, str | int | float | bool])
    """Keyword arguments of the class's constructor."""

    @property
    def module(self) -> str:
        """The name of its class."""
        return self.name


class BubblewrapSandbox(Kind, frozen=True, tag="bubblewrap"):
    """The program has /usr, Python and `files`, read-only, and no network but its own endpoint."""

    files: tuple[str, ...] = ()
    """Files and folders that the program may read."""
    memory_mib: Positive = 1024
    """Memory of all its processes together."""
    disk_mib: Positive = 64
    """Size of the scratch folder."""


class CustomSandbox(Kind, frozen=True, kw_only=True, tag="class"):
    """A custom sandbox, such as a remote service: a class with `async def run(self, program) -> Ran`."""

    name: str
    """`package.module:Class` or `path/file.py:Class`."""
    arguments: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict[str, str | int | float | bool])
    """Keyword arguments of the class's constructor."""


AnySandbox: TypeAlias = BubblewrapSandbox | CustomSandbox


class AgentEnvironment(Conversation, frozen=True, kw_only=True, tag_field="kind", tag="agent"):
    """Several turns: your program calls an OpenAI-compatible endpoint, and the policy answers."""

    agent: str = ""
    """`package.module:function` or `path/file.py:function`, run for each trajectory."""
    command: tuple[str, ...] = ()
    """Or a program and its arguments."""
    sandbox: AnySandbox | None = None
    """The place in which `command` runs; without one it runs as you do."""
    host: str = "127.0.0.1"
    """Address on which each actor's endpoint listens."""
    ignored: tuple[Literal["response_format", "tool_choice"], ...] = ()
    """Parameters of requests that are ignored and counted, instead of refused: nothing enforces a form or a call."""
    timeout_s: Seconds = 600.0
    """A run that takes longer fails its trajectory."""

    @property
    def module(self) -> str:
        """The name of its function; "" for a program."""
        return self.agent

    def contradictions(self) -> Iterator[str]:
        """Either a function or a program."""
        if bool(self.agent) == bool(self.command):
            yield (
                'an agent is a function, agent = "mine.py:run", or a program, command = ["python", "agent.py"]: give '
                "one of them"
            )
        if self.sandbox is not None and not self.command:
            yield "sandbox is for a program: give command = [...]; a function runs in a process of the run"

    def refuses(self, linear: Sequence[str]) -> Iterator[str]:
        """Yield a sentence for each choice in `linear`, which excludes branches: an agent's requests may branch."""
        for choice in linear:
            yield f"{choice} does not support branches, which an agent's run may have: leave it out"


AnyEnvironment: TypeAlias = Environment | AgentEnvironment
