"""`streamppo reward-test`: scores a few completions in the same way as a run, and prints a table."""

import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from msgspec import structs

from streamppo.commands import standalone
from streamppo.commands.console import console, echo, log_to_stderr, table
from streamppo.commands.models import weights
from streamppo.config.model import BUILTIN
from streamppo.config.sections import Config, describe_limits, model_path
from streamppo.config.task import DataTask, Source
from streamppo.errors import TaskError
from streamppo.learner.model import tiny
from streamppo.rollout import build
from streamppo.rollout.player import FAILURES, Player
from streamppo.tasks import columns, data, dataset_files, plugins, stop, warmup_data
from streamppo.tasks import task as tasks
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.types import Prompt, Reward, ScoredText, ScorerReport

WIDTH = 60
NARROW = 24
COMPLETION_COLUMNS = ("completion", "finish")
"""Columns of a completion's row that are not columns of the task's data."""


log = logging.getLogger(__name__)


class TriedCompletion(NamedTuple):
    """A completion, its reward or the reason of a failure, and the seconds of scoring."""

    text: ScoredText | None
    answer: str
    reward: Reward | None
    reason: str
    seconds: float


def reward_test(config: Config, count: int, completions: Path | None) -> int:
    """Score completions, and print the table. Returns the exit code, 0 only if every completion has a reward."""
    # Errors in the file are reported before the model is loaded.
    rows = None if completions is None else list(dataset_files.rows(str(completions), "train"))
    plugins.export_path()
    transformers.utils.logging.disable_progress_bar()
    with log_to_stderr(), tempfile.TemporaryDirectory() as folder, standalone.reward_models(config) as models:
        path = model_path(config, Path(folder))
        if config.model.path == BUILTIN and rows is None:
            tiny.make(config, Path(path))
        elif config.model.path == BUILTIN:
            # Given completions need only the tokenizer.
            character_tokenizer(warmup_data.prepare(config).alphabet).save_pretrained(path)
        tokenizer = Tokenizer(path, config.model.clock)
        task = tasks.build(config.task, config.seed, tokenizer)
        tried, reports, agents = asyncio.run(_try(config, task, tokenizer, path, count, rows, models=models))
    _print_table(tried)
    echo(*_summary(tried, reports), *_advice(tried, config))
    if agents:
        echo(f"agents: {', '.join(f'{number:,} {name}' for name, number in sorted(agents.items()))}")
    return 0 if all(completion.reward is not None for completion in tried) else 1


async def _try(
    config: Config,
    task: Task,
    tokenizer: Tokenizer,
    path: str,
    count: int,
    rows: Sequence[tuple[str, dataset_files.Row]] | None,
    *,
    models: Mapping[str, Any],
) -> tuple[list[TriedCompletion], Sequence[ScorerReport], Mapping[str, int]]:
    rewards = Rewards(config.reward, models)
    await rewards.start(task.sources())
    try:
        if rows is not None:
            sources = list(config.task.sources.values()) if isinstance(config.task, DataTask) else []
            source = sources[0] if len(sources) == 1 else Source(data="")
            given = list(_completions(rows, task, source, tokenizer))
            return list(await asyncio.gather(*(_score(rewards, *row) for row in given))), rewards.report(), {}
        tensors = weights.model_weights(path, config.model.dtype)
        async with standalone.engine(config, "reward-test", path, 0, tensors) as engine:
            log.info("sampling %d completions of up to %d tokens", count, config.rollout.max_tokens)
            player = build.player(config, engine, path, tokenizer)
            sampled = await _play(config, player, rewards, [task.prompt(n) for n in range(count)])
            counts = dict(player.agents.counts) if player.agents else {}
        return sampled, rewards.report(), counts
    finally:
        await rewards.close()


async def _play(config: Config, player: Player, rewards: Rewards, prompts: Sequence[Prompt]) -> list[TriedCompletion]:
    async with AsyncExitStack() as ending:
        if player.agents is not None:
            ending.push_async_callback(player.agents.close)
        return list(await asyncio.gather(*(_sample(config, player, rewards, prompt) for prompt in prompts)))


async def _sample(config: Config, player: Player, rewards: Rewards, prompt: Prompt) -> TriedCompletion:
    try:
        sampling = build.sampling(config)
        limit = stop.load_limit(config.rollout.limit, sampling.max_tokens)
        episode = await player.play(prompt, sampling._replace(max_tokens=limit(prompt, None)))
    except FAILURES as error:
        return TriedCompletion(None, _answer(prompt), None, str(error), 0.0)
    text = episode.text(prompt, player.tokenizer, player.stop)
    tried = await _score(rewards, prompt, text)
    return tried._replace(reward=tried.reward and episode.reward(tried.reward))


async def _score(rewards: Rewards, prompt: Prompt, text: ScoredText) -> TriedCompletion:
    begin = time.perf_counter()
    try:
        reward, reason = await rewards.score(prompt, text), ""
    except TaskError as error:
        reward, reason = None, str(error)
    return TriedCompletion(text, _answer(prompt), reward, reason, time.perf_counter() - begin)


def _answer(prompt: Prompt) -> str:
    answer = prompt.columns.get("answer")
    return "" if answer is None else str(answer)


def _completions(
    rows: Sequence[tuple[str, dataset_files.Row]], task: Task, source: Source, tokenizer: Tokenizer
) -> Iterator[tuple[Prompt, ScoredText]]:
    """Yield the prompt and completion of rows that have a `completion`, and may have columns of the task's data.

    The prompt is in the column that `source` names, or in `prompt`. A row n without a prompt gets prompt n of the task.
    """
    for number, (where, row) in enumerate(rows):
        completion, finish = row.get("completion"), row.get("finish", "stop")
        if not isinstance(completion, str):
            raise TaskError(f"{where}: no text `completion`")
        if finish not in ("stop", "length"):
            raise TaskError(f'{where}: `finish` is "stop" or "length", not {finish!r}')
        prompt = _prompt_of(row, where, task.prompt(number), source)
        tokens = tokenizer.encode_turn(completion, finish)
        text = ScoredText(
            prompt=prompt.text,
            completion=completion,
            finish=finish,
            num_tokens=len(tokens),
            tokens=tokens.tobytes(),
            messages=prompt.messages,
            source=prompt.source,
        )
        yield prompt, text


def _prompt_of(row: dataset_files.Row, where: str, default: Prompt, source: Source) -> Prompt:
    """Return the prompt in a row by the settings of `source`, or `default` with the row's columns if it has none."""
    of_prompt = {name: value for name, value in row.items() if name not in COMPLETION_COLUMNS}
    row_columns = columns.plain_columns(of_prompt).columns
    source = data.present_columns(row_columns, source)
    name = next((name for name in (source.prompt, "prompt") if data.has_column(row_columns, name)), None)
    if name is None:
        return structs.replace(default, columns=default.columns | data.reward_columns(row_columns, where, source))
    return data.prompt(row_columns, where, default.source, structs.replace(source, prompt=name))


def _print_table(tried: Sequence[TriedCompletion]) -> None:
    rows = table("#", "reward", "ms", "tokens", "completion", "answer", "components, explanation or error")
    for column in rows.columns[:4]:
        column.justify, column.no_wrap = "right", True
    for number, completion in enumerate(tried):
        reward = "failed" if completion.reward is None else f"{completion.reward.total:.4g}"
        style = "red" if completion.reward is None else None
        rows.add_row(
            f"{number}",
            reward,
            f"{completion.seconds * 1e3:.1f}",
            _length(completion.text),
            _shorten(completion.text.completion if completion.text else "", WIDTH),
            _shorten(completion.answer, NARROW),
            _note(completion),
            style=style,
        )
    console().print(rows)


def _note(completion: TriedCompletion) -> str:
    if completion.reward is None:
        return completion.reason
    components = " ".join(f"{name}={value:.4g}" for name, value in completion.reward.components.items())
    explanation = completion.reward.explanation
    return " ".join(filter(None, (components, _shorten(explanation, WIDTH) if explanation else "")))


def _length(text: ScoredText | None) -> str:
    if text is None:
        return ""
    return f"{text.num_tokens:,}" + ("+" if text.finish == "length" else "")


def _shorten(text: str, width: int) -> str:
    """Return `text` in quotes. If it is longer than `width`, two thirds of the result are its end."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if len(quoted) <= width else f"{quoted[: width // 3]}…{quoted[1 + width // 3 - width :]}"


def _summary(tried: Sequence[TriedCompletion], reports: Sequence[ScorerReport]) -> list[str]:
    totals = [completion.reward.total for completion in tried if completion.reward is not None]
    mean = f"mean reward {sum(totals) / len(totals):.4g}, " if totals else ""
    lines = [f"{len(tried)} completions: {mean}{len(tried) - len(totals)} failed"]
    for report in reports:
        lines.append(
            f"{report.name}: {report.calls} calls, {report.failed} failed, {report.retries} tried again, "
            f"{report.respawns} processes killed, {report.mean_s * 1e3:.1f} ms mean, "
            f"{report.max_s * 1e3:.1f} ms longest"
        )
    return lines


def _advice(tried: Sequence[TriedCompletion], config: Config) -> Iterator[str]:
    texts = [completion.text for completion in tried if completion.text is not None]
    if cut := sum(text.finish == "length" for text in texts):
        yield f"{cut} of {len(texts)} completions (+) were cut off: raise {describe_limits(config)}"
    totals = {completion.reward.total for completion in tried if completion.reward is not None}
    if len(tried) > 1 and len(totals) == 1:
        yield "all scores are the same, and only differences between the completions of a prompt teach: docs/own.md"
