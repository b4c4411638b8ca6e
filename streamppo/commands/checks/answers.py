"""The check of the rows' answers against the tokens that a completion may have."""

from collections.abc import Iterator, Sequence

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.commands.checks.task import ROWS
from streamppo.config.sections import BUILTIN, Config
from streamppo.tasks import lesson
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Prompt

WORTH_A_NOTE = 0.05
"""Share of the rows with an answer that has no room."""


def answers(config: Config, task: Task, tokenizer: Tokenizer | None) -> Findings:
    """Note answers that are longer than a completion may be: a policy that writes them is cut off."""
    if config.environment is not None or (tokenizer is None and config.model.path != BUILTIN):
        return
    length = _characters if tokenizer is None else lambda text: len(tokenizer.sampled(text, "stop"))
    lengths = [length(text) for text in _texts(task.training[:ROWS])]
    bound = config.rollout.max_tokens
    longer = [length for length in lengths if length > bound]
    if len(longer) > WORTH_A_NOTE * len(lengths):
        yield Finding(
            "answers",
            "note",
            f"{len(longer)} of the first {len(lengths)} rows have an answer that is longer than rollout.max_tokens "
            f"({bound}), up to {max(longer)} tokens with its end: such a completion is cut off",
        )


def _characters(text: str) -> int:
    return len(lesson.Characters().ids(Prompt(text=text, columns={}))) + 1


def _texts(prompts: Sequence[Prompt]) -> Iterator[str]:
    found = (prompt.columns.get("answer") for prompt in prompts)
    return (answer for answer in found if isinstance(answer, str) and answer)
