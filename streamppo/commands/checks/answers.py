"""The check of the rows' answers against the token limit of a completion."""

from collections.abc import Iterator, Sequence
from decimal import Decimal

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.commands.checks.task import ROWS
from streamppo.commands.start.project import policy, sizes
from streamppo.config.model import BUILTIN
from streamppo.config.reward import FunctionScorer, Scorer
from streamppo.config.sections import Config
from streamppo.tasks import warmup_data
from streamppo.tasks.scorers import readers
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Prompt

WORTH_A_NOTE = 0.05
"""Share of the rows with an answer beyond the limit."""
FEW = 64
"""A token limit that is low for a larger model."""
SOLUTIONS = "streamppo.tasks.scorers."
"""Scorers of ours that find a number, a formula or tests in the row."""


def answers(config: Config, task: Task, tokenizer: Tokenizer | None) -> Findings:
    """Find answers beyond the token limit, answers that are numbers, and a low limit for a model that reasons."""
    if config.environment is not None:
        return
    if tokenizer is None:
        yield from _numeric(config, task.training[:ROWS])
    if tokenizer is None and config.model.path != BUILTIN:
        return
    length = _characters if tokenizer is None else lambda text: len(tokenizer.encode_turn(text, "stop"))
    lengths = [length(text) for text in _texts(task.training[:ROWS])]
    bound = config.rollout.max_tokens
    if config.model.path != BUILTIN and bound < FEW and not sizes.is_small(model := policy.look(config.model.path)):
        yield Finding(
            "answers",
            "note",
            f"rollout.max_tokens ({bound}) is little for a model of {model.parameters:,} parameters, which writes "
            "before it answers: completions are cut off",
        )
    # A long answer may be a solution, of which the reward may read only the end.
    if (
        lengths
        and min(lengths) - 1 > bound
        and max(lengths) <= FEW
        and not any(_reads_an_end(scorer) for scorer in config.reward.scorers.values())
    ):
        yield Finding(
            "answers",
            "error",
            f"rollout.max_tokens ({bound}) has room for no answer: the shortest of the first {len(lengths)} rows has "
            f"{min(lengths) - 1} tokens, so every right completion is cut off; raise it to {max(lengths)} or more",
        )
        return
    longer = [length for length in lengths if length > bound]
    if len(longer) > WORTH_A_NOTE * len(lengths):
        yield Finding(
            "answers",
            "note",
            f"{len(longer)} of the first {len(lengths)} rows have an answer that is longer than rollout.max_tokens "
            f"({bound}), up to {max(longer)} tokens with its end: such a completion is cut off",
        )


def _reads_an_end(scorer: Scorer) -> bool:
    """True for a scorer that reads the end of an answer, which may be a whole solution."""
    return isinstance(scorer, FunctionScorer) and scorer.function.startswith(SOLUTIONS)


def _numeric(config: Config, prompts: Sequence[Prompt]) -> Findings:
    """Note answers that are numbers: a reward of the user's that compares them with texts is never right."""
    answers = [prompt.columns.get("answer") for prompt in prompts]
    numbers = [
        answer for answer in answers if isinstance(answer, int | float | Decimal) and not isinstance(answer, bool)
    ]
    others = [scorer for scorer in config.reward.scorers.values() if isinstance(scorer, FunctionScorer)]
    if numbers and any(readers.reader_of(scorer.function) is None for scorer in others):
        kinds = " or ".join(sorted({type(value).__name__ for value in numbers}))
        text = f"{len(numbers)} of the first {len(answers)} rows have a number as their answer, such as {numbers[0]!r}"
        yield Finding("answers", "note", f"{text}: the reward gets it as {kinds}, and a completion is a text")


def _characters(text: str) -> int:
    return len(warmup_data.Characters().ids(Prompt(text=text, columns={}))) + 1


def _texts(prompts: Sequence[Prompt]) -> Iterator[str]:
    values = (prompt.columns.get("answer") for prompt in prompts)
    return (answer for answer in values if isinstance(answer, str) and answer)
