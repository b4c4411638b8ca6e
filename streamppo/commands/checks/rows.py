"""Checks rows of the data: whether streamppo's scorers can read the answers, and how scorers score the answers.

A few rows of each source go through template, tokenizer and scorers, with the row's answer as the completion. Models,
judges and services are not called.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from streamppo.commands.checks.finding import Finding, Findings, reward_subject
from streamppo.config.reward import FunctionScorer, Reward, Scorer
from streamppo.config.sections import Config
from streamppo.errors import RewardFailed, TaskError
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.scorers import gold, readers
from streamppo.tasks.scorers.answers import extract_boxed
from streamppo.tasks.scorers.readers import Reader
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.tasks.warmup_data import Lesson
from streamppo.types import Prompt, ScoredText

SCORED = 8
SOURCES = 8
PLACES = 3
READING_S = 5.0
"""Time limit for reading the answers of one scorer's rows. Formulas take longest."""
QUOTED = 60
SHOWN = 1000
MATH = "streamppo.tasks.scorers.maths:Math"


class UnreadableAnswers:
    """Counts answers that streamppo's scorers cannot read; called with every row (`tasks.data.VisitPrompt`)."""

    def __init__(self, config: Config) -> None:
        self._limit = config.queue.max_failure_rate
        self._scorers = [
            _ScorerRows(name, scorer, reader)
            for name, scorer in config.reward.scorers.items()
            if isinstance(scorer, FunctionScorer) and (reader := readers.READERS.get(scorer.function)) is not None
        ]

    def __call__(self, where: str, prompt: Prompt) -> None:
        for scorer in self._scorers:
            scorer.read(where, prompt)

    def findings(self) -> Findings:
        """Report the unreadable rows of each scorer, as an error if their share is above queue.max_failure_rate."""
        for scorer in self._scorers:
            if scorer.unreadable:
                rows = "row fails" if scorer.unreadable == 1 else "rows fail"
                state = "error" if scorer.unreadable > self._limit * scorer.count else "note"
                text = f"{scorer.unreadable} of {scorer.count} {rows} for every completion: the scorer cannot read the "
                yield Finding(reward_subject(scorer.name), state, f"{text}answer: {'; '.join(scorer.places)}")


class _ScorerRows:
    def __init__(self, name: str, scorer: FunctionScorer, reader: Reader) -> None:
        self.name = name
        self.count = self.unreadable = 0
        self.places: list[str] = []
        self._scorer, self._reader = scorer, reader
        self._reading_s = 0.0

    def read(self, where: str, prompt: Prompt) -> None:
        if not scores_source(self._scorer, prompt) or self._reading_s > READING_S:
            return
        begin = time.perf_counter()
        self.count += 1
        try:
            self._reader(prompt.columns)
        except TaskError as error:
            self.unreadable += 1
            if len(self.places) < PLACES:
                self.places.append(f"{where}: {error}")
        self._reading_s += time.perf_counter() - begin


def scores_source(scorer: Scorer, prompt: Prompt) -> bool:
    """True if `scorer` scores prompts of this prompt's source."""
    return not scorer.sources or prompt.source in scorer.sources


class _GoldScore(NamedTuple):
    total: float | None
    reason: str = ""


def score(config: Config, task: Task, tokenizer: Tokenizer | None, *, call: bool) -> Findings:
    """Show a prompt in the form that the model gets. If `call` is true, score rows of each source."""
    if tokenizer is None:
        yield Finding("rows", "later", "rows are scored on a machine with the model's tokenizer")
        return
    if config.environment is not None:
        return
    prompts = _first_of_sources(task)
    try:
        text, count = tokenizer.render(prompts[0]), len(tokenizer.encode(prompts[0]))
        shown = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
        yield Finding("example", "ok", f"a prompt as the model sees it, {count} tokens: {json.dumps(shown)}")
        rows = [(prompt, _gold_completion(prompt, tokenizer)) for prompt in prompts]
    except TaskError as error:
        yield Finding("rows", "error", str(error))
        return
    yield from _altered_answers(rows)
    for name, scorer in config.reward.scorers.items():
        scored = [(prompt, text) for prompt, text in rows if scores_source(scorer, prompt)]
        if isinstance(scorer, FunctionScorer) and scored and call:
            yield _verdict(name, asyncio.run(_scores(name, scorer, scored)), [text for _, text in scored])


def characters(lesson: Lesson) -> Tokenizer:
    """Return the tokenizer of builtin:tiny."""
    with tempfile.TemporaryDirectory() as folder:
        character_tokenizer(lesson.alphabet).save_pretrained(folder)
        return Tokenizer(Path(folder))


def _first_of_sources(task: Task) -> list[Prompt]:
    sources: dict[str, list[Prompt]] = {}
    for prompt in task.training:
        if prompt.source in sources or len(sources) < SOURCES:
            rows = sources.setdefault(prompt.source, [])
            if len(rows) < SCORED:
                rows.append(prompt)
    return [prompt for rows in sources.values() for prompt in rows]


def _gold_completion(prompt: Prompt, tokenizer: Tokenizer) -> ScoredText:
    """Return the row's answer as a completion, decoded from its tokens; empty if it is neither text nor number."""
    completion, has_end = gold.completion(prompt.columns.get("answer")), tokenizer.eos_id is not None
    tokens = tokenizer.encode_turn(completion, "stop") if completion or has_end else None
    if tokens is not None:
        completion = tokenizer.completion(tokens[:-1] if has_end else tokens)
    return ScoredText(
        prompt=prompt.text,
        completion=completion,
        finish="stop",
        num_tokens=0 if tokens is None else len(tokens),
        tokens=b"" if tokens is None else tokens.tobytes(),
        messages=prompt.messages,
        source=prompt.source,
    )


def _altered_answers(rows: Sequence[tuple[Prompt, ScoredText]]) -> Findings:
    """Note the first answer whose tokens decode to a different text: no completion can equal this answer."""
    for prompt, text in rows:
        answer = gold.completion(prompt.columns.get("answer"))
        if answer != text.completion:
            spellings = f"the answer {ascii(answer)[:QUOTED]} as {ascii(text.completion)[:QUOTED]}"
            yield Finding("rows", "note", f"the tokenizer writes {spellings}: a reward that compares texts fails")
            return


async def _scores(
    name: str, scorer: FunctionScorer, rows: Sequence[tuple[Prompt, ScoredText]]
) -> Sequence[_GoldScore] | TaskError:
    rewards = Rewards(Reward(scorers={name: scorer}))
    try:
        await rewards.start(set())
        return await asyncio.gather(*(_score(rewards, prompt, _in_box(scorer, text)) for prompt, text in rows))
    except RewardFailed:
        raise
    except TaskError as error:
        return error
    finally:
        await rewards.close()


def _in_box(scorer: FunctionScorer, text: ScoredText) -> ScoredText:
    """If the scorer is `Math`, which reads LaTeX boxes, put a completion without a box into a box."""
    if scorer.function != MATH or extract_boxed(text.completion) is not None:
        return text
    return structs.replace(text, completion=rf"\boxed{{{text.completion}}}")


async def _score(rewards: Rewards, prompt: Prompt, text: ScoredText) -> _GoldScore:
    try:
        return _GoldScore((await rewards.score(prompt, text)).total)
    except RewardFailed as error:
        return _GoldScore(None, str(error))


def _verdict(name: str, scored: Sequence[_GoldScore] | TaskError, texts: Sequence[ScoredText]) -> Finding:
    subject = reward_subject(name)
    if isinstance(scored, TaskError):
        return Finding(subject, "error", str(scored))
    totals = [score.total for score in scored if score.total is not None]
    failures = [score.reason for score in scored if score.total is None]
    is_answered = any(text.completion for text in texts)
    rows = "rows with their own answer as the completion" if is_answered else "rows without a text or number as answer"
    if not totals:
        advice = "; if it runs only on another machine, check with --no-score"
        if "'list'" in failures[0] and any(text.messages for text in texts):
            advice = (
                ": in a chat, prompts and completions are lists of messages, and a text is completions[0][0]['content']"
            )
        return Finding(subject, "error", f"all {len(scored)} {rows} failed: {failures[0]}{advice}")
    spread = f"{min(totals):g} to {max(totals):g}" if min(totals) < max(totals) else f"{totals[0]:g}"
    text = f"{len(totals)} {rows} score {spread}" + ("" if is_answered else " with an empty completion")
    if failures:
        return Finding(subject, "note", f"{text}, and {len(failures)} failed: {failures[0]}")
    if max(totals) <= 0 and is_answered:
        return Finding(
            subject, "note", f"{text}, as wrong answers do: does the reward expect another form, or is it a penalty?"
        )
    return Finding(subject, "ok", text)
