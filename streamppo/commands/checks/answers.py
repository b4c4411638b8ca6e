"""The check of the rows' answers against the tokens that a completion may have."""

from collections.abc import Iterator, Sequence
from decimal import Decimal

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.commands.checks.task import ROWS
from streamppo.commands.start.project import policy, sizes
from streamppo.config.reward import FunctionScorer, Scorer
from streamppo.config.sections import BUILTIN, Config
from streamppo.tasks import warmup_data
from streamppo.tasks.scorers import readers
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Prompt

WORTH_A_NOTE = 0.05
"""Share of the rows with an answer that has no room."""
FEW = 64
"""Tokens of a completion that are few for a model that is not small."""
SOLUTIONS = "streamppo.tasks.scorers."
"""Scorers of ours that find a number, a formula or tests in the row."""


def answers(config: Config, task: Task, tokenizer: Tokenizer | None) -> Findings:
    """Find answers that are longer than a completion may be, or numbers; and little room for a model that reasons."""
    if config.environment is not None:
        return
    if tokenizer is None:
        yield from _numeric(config, task.training[:ROWS])
    if tokenizer is None and config.model.path != BUILTIN:
        return
    length = _characters if tokenizer is None else lambda text: len(tokenizer.encode_turn(text, "stop"))
    lengths = [length(text) for text in _texts(task.training[:ROWS])]
    bound = config.rollout.max_tokens
    if config.model.path != BUILTIN and bound < FEW and not sizes.is_small(found := policy.look(config.model.path)):
        yield Finding(
            "answers",
            "note",
            f"rollout.max_tokens ({bound}) is little for a model of {found.parameters:,} parameters, which writes "
            "before it answers: completions are cut off",
        )
    # A long answer may be a solution, of which a reward reads a part.
    if (
        lengths
        and min(lengths) - 1 > bound
        and max(lengths) <= FEW
        and not any(_reads_an_end(one) for one in config.reward.scorers.values())
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
    """True if an answer may be a whole solution, of which the scorer looks for the last part alone."""
    return isinstance(scorer, FunctionScorer) and scorer.function.startswith(SOLUTIONS)


def _numeric(config: Config, prompts: Sequence[Prompt]) -> Findings:
    """Say that numbers are no texts: a reward of the user's own that compares the two is never right."""
    answers = [prompt.columns.get("answer") for prompt in prompts]
    numbers = [one for one in answers if isinstance(one, int | float | Decimal) and not isinstance(one, bool)]
    others = [one for one in config.reward.scorers.values() if isinstance(one, FunctionScorer)]
    if numbers and any(readers.reader_of(one.function) is None for one in others):
        kinds = " or ".join(sorted({type(one).__name__ for one in numbers}))
        text = f"{len(numbers)} of the first {len(answers)} rows have a number as their answer, such as {numbers[0]!r}"
        yield Finding("answers", "note", f"{text}: the reward gets it as {kinds}, and a completion is a text")


def _characters(text: str) -> int:
    return len(warmup_data.Characters().ids(Prompt(text=text, columns={}))) + 1


def _texts(prompts: Sequence[Prompt]) -> Iterator[str]:
    found = (prompt.columns.get("answer") for prompt in prompts)
    return (answer for answer in found if isinstance(answer, str) and answer)
