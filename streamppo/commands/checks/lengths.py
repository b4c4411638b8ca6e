"""Compares lengths of answers with the token limit of a completion, and lengths of prompts with the model's context.

A token has at least one byte, so a prompt fits the context if it has no more bytes than the context has tokens.
transformers takes seconds to import, so `prompt_bytes` imports it only if every prompt has too many bytes.
"""

import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from streamppo.commands.checks import task as tasks
from streamppo.commands.checks.finding import Finding, Findings
from streamppo.commands.checks.folder import find
from streamppo.commands.checks.task import ROWS
from streamppo.commands.start.project import policy, sizes
from streamppo.config.model import BUILTIN
from streamppo.config.reward import FunctionScorer
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
"""There is a note if the answers of more than this share of rows are longer than the token limit."""
FEW_TOKENS = 64
"""A token limit below this is low, except for small models."""
SOLUTION_SCORERS = "streamppo.tasks.scorers."
"""Prefix of the scorers that read a number, a formula or tests from an answer."""
TEMPLATE_TOKENS = 256
"""Assumed maximum tokens that a chat template adds."""


def answers(config: Config, task: Task, tokenizer: Tokenizer | None) -> Findings:
    """Find answers beyond the token limit, answers that are numbers, and a token limit that is low for the model."""
    if config.environment is not None:
        return
    if tokenizer is None:
        yield from _numeric(config, task.training[:ROWS])
    if tokenizer is None and config.model.path != BUILTIN:
        return
    length = _characters if tokenizer is None else lambda text: len(tokenizer.encode_turn(text, "stop"))
    columns = (prompt.columns.get("answer") for prompt in task.training[:ROWS])
    lengths = [length(text) for text in columns if isinstance(text, str) and text]
    bound = config.rollout.max_tokens
    has_few, path = bound < FEW_TOKENS, config.model.path
    if has_few and path != BUILTIN and not sizes.is_small(model := policy.read(path)):
        text = f"rollout.max_tokens ({bound}) is low for a model of {model.parameters:,} parameters, which reasons "
        yield Finding("answers", "note", f"{text}before it answers: completions are cut off")
    # A long answer is not an error: the scorer may read only the end of a solution.
    is_answer = bool(lengths) and max(lengths) <= FEW_TOKENS
    functions = [scorer for scorer in config.reward.scorers.values() if isinstance(scorer, FunctionScorer)]
    is_answer &= not any(scorer.function.startswith(SOLUTION_SCORERS) for scorer in functions)
    if is_answer and min(lengths) - 1 > bound:
        text = (
            f"rollout.max_tokens ({bound}) has room for no answer: the shortest of the first {len(lengths)} rows has "
        )
        text += f"{min(lengths) - 1} tokens, so every right completion is cut off; raise it to {max(lengths)} or more"
        yield Finding("answers", "error", text)
        return
    longer = [length for length in lengths if length > bound]
    if len(longer) > LONG_SHARE * len(lengths):
        text = f"{len(longer)} of the first {len(lengths)} rows have an answer that is longer than rollout.max_tokens "
        text += f"({bound}), up to {max(longer)} tokens with its end: such a completion is cut off"
        yield Finding("answers", "note", text)


def _numeric(config: Config, prompts: Sequence[Prompt]) -> Findings:
    values = [prompt.columns.get("answer") for prompt in prompts]
    numbers = [value for value in values if isinstance(value, int | float | Decimal) and not isinstance(value, bool)]
    functions = [scorer for scorer in config.reward.scorers.values() if isinstance(scorer, FunctionScorer)]
    if numbers and any(readers.READERS.get(scorer.function) is None for scorer in functions):
        kinds = " or ".join(sorted({type(value).__name__ for value in numbers}))
        text = f"{len(numbers)} of the first {len(values)} rows have a number as their answer, such as {numbers[0]!r}"
        yield Finding("answers", "note", f"{text}: the reward gets it as {kinds}, and a completion is a text")


def _characters(text: str) -> int:
    return len(warmup_data.Characters().ids(Prompt(text=text, columns={}))) + 1


def prompts(task: Task, hf_config: "PretrainedConfig", tokenizer: Tokenizer) -> Findings:
    """Find prompts that leave no room for a completion in the model's context."""
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
    """Call `prompts` for a model on this machine, if every prompt has more bytes than the context has tokens."""
    bound = _positions(config)
    if bound is None or any(_bytes(prompt) + TEMPLATE_TOKENS < bound for prompt in task.training[:ROWS]):
        return
    from streamppo.commands.checks import model

    files, _ = model.load(config, None)
    if files.hf_config is None or files.tokenizer is None:
        return
    # Prompts above max_prompt_tokens are skipped or truncated.
    tokenized = tasks.load(config, files.tokenizer, limit=ROWS)
    if tokenized.task is not None:
        yield from prompts(tokenized.task, files.hf_config, files.tokenizer)


def _positions(config: Config) -> int | None:
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
