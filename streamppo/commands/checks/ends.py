"""Checks of the ends of completions, and of the rows that the engine computes."""

from collections.abc import Sequence

from transformers import PretrainedConfig

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.commands.checks.folder import find
from streamppo.config.engine import EmbeddedEngine
from streamppo.config.sections import Config, longest_row
from streamppo.errors import ModelError
from streamppo.rollout import positions
from streamppo.tasks import stop
from streamppo.tasks.tokenizer import Tokenizer

SHOWN = 3
"""Strings of rollout.stop that look like tokens, at most, in a note."""


def ends(config: Config, hf_config: PretrainedConfig, tokenizer: Tokenizer) -> Findings:
    """Name all that ends a completion, and the rows of the vocabulary that are never sampled."""
    folder, _ = find(config.model.path, "model")
    try:
        found = stop.read(folder or config.model.path, hf_config, tokenizer.hf, config.rollout.stop)
    except ModelError as error:
        yield Finding("stop", "error", str(error))
        return
    if found.ids or found.strings:
        yield Finding("stop", "ok", f"completions end at {found.described(tokenizer.name)}")
    else:
        text = "nothing ends a completion but its length: name tokens or strings in rollout.stop"
        yield Finding("stop", "note", text)
    yield from _misspelt(found.strings)
    if unknown := tokenizer.unknown(hf_config.get_text_config().vocab_size):
        text = f"{len(unknown):,} rows of the model's vocabulary are no tokens of the tokenizer: never sampled"
        yield Finding("vocabulary", "ok", text)


def _misspelt(strings: Sequence[str]) -> Findings:
    """Note strings that look like the name of a token, and are none of this tokenizer's."""
    looks = [one for one in strings if one.startswith("<|") and one.endswith("|>")][:SHOWN]
    for one in looks:
        yield Finding(
            "stop", "note", f"rollout.stop has {one!r}, which is no token here: it ends where it is spelt out"
        )


def rows(config: Config, hf_config: PretrainedConfig) -> Findings:
    """Check that the engine computes the longest rows as transformers does."""
    longest = longest_row(config)
    if isinstance(config.rollout.engine, EmbeddedEngine):
        try:
            positions.embedded(hf_config, longest)
        except ModelError as error:
            yield Finding("model", "error", str(error))
        return
    if refused := positions.refusal(hf_config, min(longest, positions.longest(hf_config, longest))):
        yield Finding("model", "error", refused)
