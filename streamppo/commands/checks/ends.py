"""Checks of the ends of completions, and of the rows that the engine computes."""

import sys
from collections.abc import Sequence

from transformers import PretrainedConfig

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.commands.checks.folder import find
from streamppo.commands.checks.task import ROWS
from streamppo.config.rollout import EmbeddedEngine
from streamppo.config.sections import Config, longest_row
from streamppo.errors import ModelError, TaskError
from streamppo.rollout import positions
from streamppo.tasks import stop
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Message

NO_TOKEN = -1
"""A token that ends no turn."""
SHOWN = 3
"""Maximum strings of rollout.stop in a note."""


def ends(config: Config, hf_config: PretrainedConfig, tokenizer: Tokenizer) -> Findings:
    """Name the ends of a completion, and the rows of the vocabulary that are never sampled."""
    folder, _ = find(config.model.path, "model")
    try:
        ending = stop.read(folder or config.model.path, hf_config, tokenizer.hf, config.rollout.stop)
    except ModelError as error:
        yield Finding("stop", "error", str(error))
        return
    if ending.ids or ending.strings:
        yield Finding("stop", "ok", f"completions end at {ending.describe(tokenizer.name)}")
    else:
        text = "nothing ends a completion but its length: name tokens or strings in rollout.stop"
        yield Finding("stop", "note", text)
    yield from _open_turn(ending, tokenizer)
    yield from _misspelt(ending.strings)
    if unknown := tokenizer.unknown(hf_config.get_text_config().vocab_size):
        text = f"{len(unknown):,} rows of the model's vocabulary are not tokens of the tokenizer: never sampled"
        yield Finding("vocabulary", "ok", text)


def _open_turn(ending: stop.Stop, tokenizer: Tokenizer) -> Findings:
    """Note a chat template that ends no turn, as GLM's, if the token that begins the next turn is not a stop."""
    if not tokenizer.hf.chat_template or tokenizer.turn_end() is not None:
        return
    try:
        first = int(tokenizer.observation((Message(role="user", content="?"),), last=NO_TOKEN)[0])
        begins = tokenizer.name(first)
    except TaskError:
        return
    if first not in ending.ids and begins not in ending.strings:
        yield Finding(
            "stop",
            "note",
            f"the chat template writes no token after an assistant's turn, and {begins!r}, which begins the next one, "
            f"ends no completion: the policy writes the next message too; rollout.stop = [{begins!r}] ends them",
        )


def context(task: Task, hf_config: PretrainedConfig, tokenizer: Tokenizer) -> Findings:
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


def _misspelt(strings: Sequence[str]) -> Findings:
    """Note strings that look like a token's name, and are not tokens of this tokenizer."""
    looks = [string for string in strings if string.startswith("<|") and string.endswith("|>")][:SHOWN]
    for string in looks:
        yield Finding(
            "stop",
            "note",
            f"rollout.stop has {string!r}, which is not a token here: a completion ends where it spells this string",
        )


def rows(config: Config, hf_config: PretrainedConfig) -> Findings:
    """Check that the engine computes the longest rows as transformers does."""
    longest = longest_row(config)
    if isinstance(config.rollout.engine, EmbeddedEngine):
        try:
            positions.embedded_limit(hf_config, longest)
        except ModelError as error:
            yield Finding("model", "error", str(error))
        return
    if refused := positions.refusal(hf_config, min(longest, positions.longest(hf_config, longest))):
        yield Finding("model", "error", refused)
