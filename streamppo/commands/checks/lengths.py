"""Checks of lengths: answers against the token limit of a completion, prompts against the model's context.

A token has at least one byte, so a prompt whose bytes fit the context fits it with its tokens. transformers takes
seconds to import: `prompt_bytes` imports it only if the bytes of no first prompt fit.
"""

import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from streamppo.commands.checks import task as tasks
from streamppo.commands.checks.finding import Finding, Findings
from streamppo.commands.checks.folder import find
from streamppo.commands.checks.task import ROWS
from streamppo.commands.start.project import policy, sizes
from streamppo.config.model import BUILTIN
from streamppo.config.reward import FunctionScorer, Scorer
from streamppo.config.sections import Config
from streamppo.errors import ModelError
from streamppo.rollout import positions
from streamppo.tasks import warmup_data
from streamppo.tasks.scorers import readers
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Prompt
from streamppo.weights.models import folder as folders

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LONG_SHARE = 0.05
"""A larger share of rows with an answer beyond the limit is noted."""
FEW_TOKENS = 64
"""A token limit that is low for a larger model."""
SOLUTION_SCORERS = "streamppo.tasks.scorers."
"""Scorers of ours that find a number, a formula or tests in the row."""
TEMPLATE_TOKENS = 256
"""About the most tokens that a chat template adds."""


# --- answers -------------------------------------------------------------------------------------------------


def answers(config: Config, task: Task, tokenizer: Tokenizer | None) -> Findings:
    """Find answers beyond the token limit, answers that are numbers, and a low limit for a model that reasons."""
    if config.environment is not None:
        return
    if tokenizer is None:
        yield from _numeric(config, task.training[:ROWS])
    if tokenizer is None and config.model.path != BUILTIN:
        return
    length = _characters if tokenizer is None else lambda text: len(tokenizer.encode_turn(text, "stop"))
    lengths = [length(text) for text in _answer_texts(task.training[:ROWS])]
    bound = config.rollout.max_tokens
    if (
        config.model.path != BUILTIN
        and bound < FEW_TOKENS
        and not sizes.is_small(model := policy.read(config.model.path))
    ):
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
        and max(lengths) <= FEW_TOKENS
        and not any(_reads_solutions(scorer) for scorer in config.reward.scorers.values())
    ):
        yield Finding(
            "answers",
            "error",
            f"rollout.max_tokens ({bound}) has room for no answer: the shortest of the first {len(lengths)} rows has "
            f"{min(lengths) - 1} tokens, so every right completion is cut off; raise it to {max(lengths)} or more",
        )
        return
    longer = [length for length in lengths if length > bound]
    if len(longer) > LONG_SHARE * len(lengths):
        yield Finding(
            "answers",
            "note",
            f"{len(longer)} of the first {len(lengths)} rows have an answer that is longer than rollout.max_tokens "
            f"({bound}), up to {max(longer)} tokens with its end: such a completion is cut off",
        )


def _reads_solutions(scorer: Scorer) -> bool:
    return isinstance(scorer, FunctionScorer) and scorer.function.startswith(SOLUTION_SCORERS)


def _numeric(config: Config, prompts: Sequence[Prompt]) -> Findings:
    """Note answers that are numbers: a reward of the user's that compares them with texts is never right."""
    values = [prompt.columns.get("answer") for prompt in prompts]
    numbers = [value for value in values if isinstance(value, int | float | Decimal) and not isinstance(value, bool)]
    functions = [scorer for scorer in config.reward.scorers.values() if isinstance(scorer, FunctionScorer)]
    if numbers and any(readers.READERS.get(scorer.function) is None for scorer in functions):
        kinds = " or ".join(sorted({type(value).__name__ for value in numbers}))
        text = f"{len(numbers)} of the first {len(values)} rows have a number as their answer, such as {numbers[0]!r}"
        yield Finding("answers", "note", f"{text}: the reward gets it as {kinds}, and a completion is a text")


def _characters(text: str) -> int:
    return len(warmup_data.Characters().ids(Prompt(text=text, columns={}))) + 1


def _answer_texts(prompts: Sequence[Prompt]) -> Iterator[str]:
    values = (prompt.columns.get("answer") for prompt in prompts)
    return (answer for answer in values if isinstance(answer, str) and answer)


# --- prompts -------------------------------------------------------------------------------------------------


def prompts(task: Task, hf_config: "PretrainedConfig", tokenizer: Tokenizer) -> Findings:
    """Find prompts that leave no room in the model's context: their completions fail."""
    bound = positions.longest(hf_config, sys.maxsize)
    lengths = [min(len(tokenizer.ids(prompt)), prompt.max_tokens or sys.maxsize) for prompt in task.training[:ROWS]]
    longer = [length for length in lengths if length >= bound]
    if longer:
        state = "error" if len(longer) == len(lengths) else "note"
        count = "all" if state == "error" else f"{len(longer)}"
        text = f"{count} of the first {len(lengths)} prompts leave no room for a completion in the model's context of "
        text += f"{bound} tokens"
        advice = "their completions fail; a lower max_prompt_tokens with too_long leaves them out or cuts them"
        yield Finding("context", state, f"{text}, with up to {max(longer)}: {advice}")


def prompt_bytes(config: Config, task: Task) -> Findings:
    """Find that no prompt leaves room in the context of a model on this machine."""
    bound = _positions(config)
    if bound is None or any(_bytes(prompt) + TEMPLATE_TOKENS < bound for prompt in task.training[:ROWS]):
        return
    # Slow to import, and most prompts are short.
    from streamppo.commands.checks import model

    files, _ = model.load(config, None)
    if files.hf_config is None or files.tokenizer is None:
        return
    # max_prompt_tokens leaves out some prompts.
    tokenized = tasks.load(config, files.tokenizer, limit=ROWS)
    if tokenized.task is not None:
        yield from prompts(tokenized.task, files.hf_config, files.tokenizer)


def _positions(config: Config) -> int | None:
    """The model's number of positions; None for builtin:tiny, an absent model, and a model without the number."""
    folder = None if config.model.path == BUILTIN else find(config.model.path, "model")[0]
    if folder is None:
        return None
    try:
        settings = folders.kind(Path(folder))
    except ModelError:
        return None
    text = settings.get("text_config")
    limit = (text if isinstance(text, dict) else settings).get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def _bytes(prompt: Prompt) -> int:
    return len((prompt.text + "".join(message.text for message in prompt.messages)).encode(errors="surrogatepass"))
