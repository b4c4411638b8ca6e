"""A task is an endless seeded stream of training prompts, and a fixed list of held-out ones."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice, zip_longest
from types import MappingProxyType
from typing import NamedTuple, Protocol
from zlib import crc32

from streamppo.config.task import ArithmeticTask, CalculatorTask, DataTask, GymTask, VerifiersTask
from streamppo.config.task import Task as TaskConfig
from streamppo.tasks import split
from streamppo.tasks.data import Data, Look, Measure
from streamppo.tasks.library import verifiers
from streamppo.tasks.library.arithmetic import Arithmetic, difficulty
from streamppo.tasks.library.calculator import demonstrations
from streamppo.tasks.library.gym import Gym
from streamppo.tasks.order import Mixture, RampedOrder, ShuffledOrder
from streamppo.types import Prompt


class TaskRows(Protocol):
    """The finite rows behind a task."""

    @property
    def training(self) -> Sequence[Prompt]:
        """Rows that are trained on."""
        ...

    @property
    def held_out(self) -> Sequence[Prompt]:
        """Rows that are only evaluated on."""
        ...


class PromptStream(NamedTuple):
    """One source of prompts: `rows`, in the endless `order` of positions.

    `lengths` counts prompts that are too long, `notes` are sentences about rows, files and columns.
    """

    name: str
    rows: TaskRows
    order: Callable[[int], int]
    weight: float = 1.0
    lengths: Mapping[str, int] = MappingProxyType({})
    notes: Sequence[str] = ()


class Task:
    """Prompt number p is a function of (configuration, seed, p) alone.

    So an identity is enough to rebuild its prompt, and a resumed run goes on with the very prompts that it would have
    had.
    """

    def __init__(self, streams: Sequence[PromptStream], seed: int, demonstrations: Sequence[Prompt] = ()) -> None:
        self._streams = streams
        self._demonstrations = demonstrations
        self._mixture = Mixture({stream.name: stream.weight for stream in streams}, seed) if len(streams) > 1 else None

    def prompt(self, number: int) -> Prompt:
        """Return prompt `number` >= 0 of the training stream."""
        source, position = self._mixture(number) if self._mixture else (0, number)
        stream = self._streams[source]
        return stream.rows.training[stream.order(position)]

    @property
    def training(self) -> Sequence[Prompt]:
        """All training prompts, each once."""
        if len(self._streams) == 1:
            return self._streams[0].rows.training
        return list(chain.from_iterable(stream.rows.training for stream in self._streams))

    @property
    def demonstrations(self) -> Sequence[Prompt]:
        """Prompts with answers that a warm start learns from: the training prompts, if the task has no others."""
        return self._demonstrations or self.training

    def held_out(self, limit: int | None) -> Sequence[Prompt]:
        """Return the first `limit` held-out prompts, or all, sources in turn: the same ones in every evaluation."""
        turns = zip_longest(*(stream.rows.held_out[:limit] for stream in self._streams))
        return list(islice((prompt for prompt in chain.from_iterable(turns) if prompt is not None), limit))

    def sources(self) -> set[str]:
        """Return every name that prompts have as their source."""
        return {prompt.source for stream in self._streams for prompt in (*stream.rows.training, *stream.rows.held_out)}

    def notes(self) -> list[str]:
        """Say which rows are repeated, which evaluation prompts are trained on, and which columns are left out."""
        return [note for stream in self._streams for note in stream.notes]

    def lengths(self) -> dict[str, int]:
        """Count the prompts that are too long, by source and by their treatment (skipped or truncated)."""
        return {
            f"{stream.name}: {treatment}": count
            for stream in self._streams
            for treatment, count in stream.lengths.items()
            if count
        }


def build(
    config: TaskConfig,
    seed: int,
    tokenizer: Measure | None = None,
    *,
    limit: int | None = None,
    look: Look | None = None,
) -> Task:
    """Build the task that the configuration names; without a tokenizer no prompt is measured.

    With a `limit`, no more than that many rows of any data set are read, to see that they can be; `look` is told of
    each row of them.
    Raises `TaskError` if its data cannot be read.
    """
    match config:
        case ArithmeticTask():
            return Task([_arithmetic(config, seed)], seed)
        case DataTask():
            rows = {
                name: Data(name, source, seed, tokenizer, limit, look=look) for name, source in config.sources.items()
            }
            return Task(_streams(config, rows, seed), seed)
        case GymTask(dataset=name):
            rows = Gym(config, seed)
            return Task([PromptStream(name, rows, ShuffledOrder(len(rows.training), seed), notes=rows.notes)], seed)
        case CalculatorTask(first=first, second=second, held_out=held_out):
            rows = Arithmetic(first, second, held_out, seed)
            stream = PromptStream("arithmetic", rows, ShuffledOrder(len(rows.training), seed))
            return Task([stream], seed, demonstrations(rows.training))
        case VerifiersTask(environment=name):
            rows = verifiers.Rows(config, seed)
            return Task([PromptStream(name, rows, ShuffledOrder(len(rows.training), seed), notes=rows.notes)], seed)


def _arithmetic(config: ArithmeticTask, seed: int) -> PromptStream:
    rows = Arithmetic(config.first, config.second, config.held_out, seed)
    order = ShuffledOrder(len(rows.training), seed)
    if config.ramp_prompts:
        order = RampedOrder([difficulty(prompt) for prompt in rows.training], config.ramp_prompts, seed)
    return PromptStream("arithmetic", rows, order)


def _streams(config: DataTask, data: Mapping[str, Data], seed: int) -> list[PromptStream]:
    """Make the streams of data sets: what one of them holds out by its share, none of them trains on."""
    taken: set[bytes] = set()
    for rows in data.values():
        taken.update(rows.held_out_keys if rows.is_divided else ())
    for rows in data.values():
        rows.leave(taken)
    trained = {key for rows in data.values() for key in rows.keys}
    return [
        PromptStream(
            name,
            rows,
            # Sources of equal length must not be visited in equal orders.
            ShuffledOrder(len(rows.training), *((seed,) if len(data) == 1 else (seed, crc32(name.encode())))),
            config.sources[name].weight,
            rows.lengths,
            [*rows.notes, *split.describe_overlap(rows.held_out_keys, trained, name)],
        )
        for name, rows in data.items()
    ]
