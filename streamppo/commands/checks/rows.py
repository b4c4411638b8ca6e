"""Checks of real rows: the gold answers that our scorers cannot read, and scores of the rows' own answers.

Each source gives a few rows to template, tokenizer and reward. The completion is the row's own answer. Rewards that are
models, judges or services are not called.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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

COUNT = 8
"""Rows of each source that are scored."""
SOURCES = 8
"""Sources whose rows are scored."""
PLACES = 3
"""Maximum unreadable rows that are named."""
READING_S = 5.0
"""Time to read the answers of a scorer's rows; formulas take longest."""
QUOTED = 60
"""Characters of an answer in a note."""
SHOWN = 1000
"""Characters of the example."""
MATH = "streamppo.tasks.scorers.maths:Math"


class Faults:
    """Counts the rows that our scorers cannot read. It is called with every row (`tasks.data.Look`)."""

    def __init__(self, config: Config) -> None:
        self._limit = config.queue.max_failure_rate
        self._scorers = [
            _Read(name, scorer, reader)
            for name, scorer in config.reward.scorers.items()
            if isinstance(scorer, FunctionScorer) and (reader := readers.reader_of(scorer.function)) is not None
        ]

    def __call__(self, where: str, prompt: Prompt) -> None:
        """Read the answer of one row."""
        for scorer in self._scorers:
            scorer.read(where, prompt)

    def findings(self) -> Findings:
        """Report the number of failing rows and the first places. More than queue.max_failure_rate is an error."""
        for scorer in self._scorers:
            if scorer.bad:
                rows = "row fails" if scorer.bad == 1 else "rows fail"
                yield Finding(
                    reward_subject(scorer.name),
                    "error" if scorer.bad > self._limit * scorer.seen else "note",
                    f"{scorer.bad} of {scorer.seen} {rows} for every completion: the scorer cannot read the answer: "
                    f"{'; '.join(scorer.places)}",
                )


class _Read:
    """One scorer and the rows that it has read."""

    def __init__(self, name: str, scorer: FunctionScorer, reader: Reader) -> None:
        self.name = name
        self.seen = self.bad = 0
        self.places: list[str] = []
        self._scorer, self._reader = scorer, reader
        self._spent_s = 0.0

    def read(self, where: str, prompt: Prompt) -> None:
        if not is_for(self._scorer, prompt) or self._spent_s > READING_S:
            return
        begin = time.perf_counter()
        self.seen += 1
        try:
            self._reader(prompt.columns)
        except TaskError as error:
            self.bad += 1
            if len(self.places) < PLACES:
                self.places.append(f"{where}: {error}")
        self._spent_s += time.perf_counter() - begin


def is_for(scorer: Scorer, prompt: Prompt) -> bool:
    """True if the scorer scores prompts of this source."""
    return not scorer.sources or prompt.source in scorer.sources


class _OwnAnswerScore(NamedTuple):
    """The total of a row's own answer, or the reason why it has none."""

    total: float | None
    reason: str = ""


def score(config: Config, task: Task, tokenizer: Tokenizer | None, *, call: bool) -> Findings:
    """Show a prompt as the model sees it, and score rows of each source if `call` is true."""
    if tokenizer is None:
        yield Finding("rows", "later", "rows are scored where the model's tokenizer is")
        return
    prompts = _first(task)
    if config.environment is None:
        try:
            yield _example(prompts[0], tokenizer)
            rows = [(prompt, _own_completion(prompt, tokenizer)) for prompt in prompts]
        except TaskError as error:
            yield Finding("rows", "error", str(error))
            return
        yield from _respelled(rows)
        for name, scorer in config.reward.scorers.items():
            of_scorer = [(prompt, text) for prompt, text in rows if is_for(scorer, prompt)]
            if isinstance(scorer, FunctionScorer) and of_scorer and call:
                yield _verdict(name, asyncio.run(_scores(name, scorer, of_scorer)), [text for _, text in of_scorer])


def characters(lesson: Lesson) -> Tokenizer:
    """Make the tokenizer that builtin:tiny will have."""
    with tempfile.TemporaryDirectory() as folder:
        character_tokenizer(lesson.alphabet).save_pretrained(folder)
        return Tokenizer(Path(folder))


def _first(task: Task) -> list[Prompt]:
    """Pick the first training prompts of each source."""
    sources: dict[str, list[Prompt]] = {}
    for prompt in task.training:
        if prompt.source in sources or len(sources) < SOURCES:
            rows = sources.setdefault(prompt.source, [])
            if len(rows) < COUNT:
                rows.append(prompt)
    return [prompt for rows in sources.values() for prompt in rows]


def _example(prompt: Prompt, tokenizer: Tokenizer) -> Finding:
    text, count = tokenizer.render(prompt), len(tokenizer.encode(prompt))
    shown = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
    return Finding("example", "ok", f"a prompt as the model sees it, {count} tokens: {json.dumps(shown)}")


def _own_completion(prompt: Prompt, tokenizer: Tokenizer) -> ScoredText:
    """Make the row's own answer a completion, as its tokens are written; an empty one for no text or number."""
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


def _respelled(rows: Sequence[tuple[Prompt, ScoredText]]) -> Findings:
    """Note the first answer that no completion equals, because its tokens are another text."""
    for prompt, text in rows:
        answer = gold.completion(prompt.columns.get("answer"))
        if answer != text.completion:
            shown = ascii(answer)[:QUOTED], ascii(text.completion)[:QUOTED]
            why = (
                f"the tokenizer writes the answer {shown[0]} as {shown[1]}: a reward that compares texts never sees it"
            )
            yield Finding("rows", "note", why)
            return


async def _scores(
    name: str, scorer: FunctionScorer, rows: Sequence[tuple[Prompt, ScoredText]]
) -> Sequence[_OwnAnswerScore] | TaskError:
    """Score the rows as a run would; an error if the reward cannot be loaded."""
    rewards = Rewards(Reward(scorers={name: scorer}))
    try:
        await rewards.start(set())
        return await asyncio.gather(*(_score(rewards, prompt, _written_for(scorer, text)) for prompt, text in rows))
    except RewardFailed:
        raise
    except TaskError as error:
        return error
    finally:
        await rewards.close()


def _written_for(scorer: FunctionScorer, text: ScoredText) -> ScoredText:
    """Put the answer into the box in which `Math` looks for it."""
    if scorer.function != MATH or extract_boxed(text.completion) is not None:
        return text
    fields = {name: getattr(text, name) for name in text.__struct_fields__}
    return ScoredText(**{**fields, "completion": rf"\boxed{{{text.completion}}}"})


async def _score(rewards: Rewards, prompt: Prompt, text: ScoredText) -> _OwnAnswerScore:
    try:
        return _OwnAnswerScore((await rewards.score(prompt, text)).total)
    except RewardFailed as error:
        return _OwnAnswerScore(None, str(error))


def _verdict(name: str, scored: Sequence[_OwnAnswerScore] | TaskError, texts: Sequence[ScoredText]) -> Finding:
    subject = reward_subject(name)
    if isinstance(scored, TaskError):
        return Finding(subject, "error", str(scored))
    totals = [score.total for score in scored if score.total is not None]
    failures = list(_failures(scored))
    is_answered = any(text.completion for text in texts)
    rows = "rows with their own answer as the completion" if is_answered else "rows without a text or number as answer"
    if not totals:
        advice = _chat_advice(failures[0], texts)
        return Finding(subject, "error", f"all {len(scored)} {rows} failed: {failures[0]}{advice}")
    spread = f"{min(totals):g} to {max(totals):g}" if min(totals) < max(totals) else f"{totals[0]:g}"
    text = f"{len(totals)} {rows} score {spread}" + ("" if is_answered else " with an empty completion")
    if failures:
        return Finding(subject, "note", f"{text}, and {len(failures)} failed: {failures[0]}")
    if max(totals) <= 0 and is_answered:
        return Finding(subject, "note", f"{text}: no more than for a wrong one, unless it asks for a form of its own")
    return Finding(subject, "ok", text)


def _chat_advice(failure: str, texts: Sequence[ScoredText]) -> str:
    """Return TRL's form of a chat where a reward takes a list of messages for a text; "" elsewhere."""
    if "'list'" not in failure or not any(text.messages for text in texts):
        return ""
    return ": of a chat, prompts and completions are lists of messages, so a text is completions[0][0]['content']"


def _failures(scored: Sequence[_OwnAnswerScore]) -> Iterator[str]:
    return (score.reason for score in scored if score.total is None)
