"""A task: an endless seeded stream of training prompts, and a fixed list of held-out ones."""

from collections.abc import Mapping, Sequence
from itertools import chain, islice, zip_longest
from types import MappingProxyType
from typing import NamedTuple
from zlib import crc32

from streamppo.config.task import ArithmeticTask, CalculatorTask, DataTask, GymTask, VerifiersTask
from streamppo.config.task import Task as TaskConfig
from streamppo.tasks import split
from streamppo.tasks.data import Data, Measure, VisitPrompt
from streamppo.tasks.library import arithmetic, gym, verifiers
from streamppo.tasks.library.calculator import demonstrations
from streamppo.tasks.order import PromptOrder, RowNumbers, ShuffledOrder, SourceRows
from streamppo.tasks.split import SplitPrompts
from streamppo.types import Prompt


class PromptStream(NamedTuple):
    """One source of prompts. `order` maps each position >= 0 to a training row. `lengths` counts too long prompts."""

    name: str
    rows: Data | SplitPrompts
    order: ShuffledOrder
    weight: float = 1.0
    lengths: Mapping[str, int] = MappingProxyType({})
    notes: Sequence[str] = ()


class Task:
    """The prompts of a task. Prompt number p is a function of only (configuration, seed, p)."""

    def __init__(self, streams: Sequence[PromptStream], seed: int, demonstrations: Sequence[Prompt] = ()) -> None:
        self._streams = streams
        self._demonstrations = demonstrations
        self._seed = seed
        self._order = PromptOrder(
            [stream.order for stream in streams], {stream.name: stream.weight for stream in streams}, seed
        )

    def prompt(self, number: int) -> Prompt:
        source, row = self._order(number)
        return self._streams[source].rows.training[row]

    def row_numbers(self) -> RowNumbers:
        """Return the mapping from prompt numbers to row numbers, for the queue."""
        return RowNumbers(sources=tuple(map(_source_rows, self._streams)), seed=self._seed)

    @property
    def training(self) -> Sequence[Prompt]:
        if len(self._streams) == 1:
            return self._streams[0].rows.training
        return list(chain.from_iterable(stream.rows.training for stream in self._streams))

    @property
    def demonstrations(self) -> Sequence[Prompt]:
        """Prompts with answers for the warm-up; by default the training prompts."""
        return self._demonstrations or self.training

    def held_out(self, limit: int | None) -> Sequence[Prompt]:
        """Return the first `limit` held-out prompts (None: all), alternating between the sources."""
        turns = zip_longest(*(stream.rows.held_out[:limit] for stream in self._streams))
        return list(islice((prompt for prompt in chain.from_iterable(turns) if prompt is not None), limit))

    def sources(self) -> set[str]:
        return {prompt.source for stream in self._streams for prompt in (*stream.rows.training, *stream.rows.held_out)}

    def notes(self) -> list[str]:
        return [note for stream in self._streams for note in stream.notes]

    def lengths(self) -> dict[str, int]:
        """Return the counts of too long prompts. Example: {"gsm8k: skipped": 3}."""
        return {
            f"{stream.name}: {treatment}": count
            for stream in self._streams
            for treatment, count in stream.lengths.items()
            if count
        }


def _source_rows(stream: PromptStream) -> SourceRows:
    content = 0
    for prompt in stream.rows.training:
        content = crc32(prompt.text.encode(errors="surrogatepass"), content)
    order = stream.order
    return SourceRows(name=stream.name, weight=stream.weight, count=order.count, key=order.key, content=content)


def build(
    config: TaskConfig,
    seed: int,
    tokenizer: Measure | None = None,
    *,
    limit: int | None = None,
    visit: VisitPrompt | None = None,
) -> Task:
    """Build the task. Without `tokenizer`, lengths are not checked. `visit` gets every row. Raises `TaskError`."""
    match config:
        case ArithmeticTask() | CalculatorTask():
            rows = arithmetic.rows(config.first, config.second, config.held_out, seed)
            stream = PromptStream("arithmetic", rows, ShuffledOrder(len(rows.training), seed))
            return Task([stream], seed, demonstrations(rows.training) if isinstance(config, CalculatorTask) else ())
        case DataTask():
            rows = {
                name: Data(name, source, seed, tokenizer, limit, visit=visit) for name, source in config.sources.items()
            }
            return Task(_streams(config, rows, seed), seed)
        case GymTask(dataset=name) | VerifiersTask(environment=name):
            rows = gym.rows(config, seed) if isinstance(config, GymTask) else verifiers.rows(config, seed)
            return Task([PromptStream(name, rows, ShuffledOrder(len(rows.training), seed), notes=rows.notes)], seed)


def _streams(config: DataTask, data: Mapping[str, Data], seed: int) -> list[PromptStream]:
    """Make the stream of each data set. A prompt held out of one data set is removed from all training rows."""
    excluded: set[bytes] = set()
    for rows in data.values():
        excluded.update(rows.held_out_keys if rows.is_divided else ())
    for rows in data.values():
        rows.remove(excluded)
    trained = {key for rows in data.values() for key in rows.keys}
    return [
        PromptStream(
            name,
            rows,
            # Sources of equal length must not have the same order.
            ShuffledOrder(len(rows.training), *((seed,) if len(data) == 1 else (seed, crc32(name.encode())))),
            config.sources[name].weight,
            rows.lengths,
            [*rows.notes, *split.describe_overlap(rows.held_out_keys, trained, name)],
        )
        for name, rows in data.items()
    ]
