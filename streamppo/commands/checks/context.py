"""Checks that prompts leave room in the model's context, fast enough for the start of a run.

A token has at least one byte, so a prompt whose bytes fit has tokens that fit. transformers takes seconds to import,
and is imported only if no first prompt fits by its bytes.
"""

from pathlib import Path

from streamppo.commands.checks import task as tasks
from streamppo.commands.checks.finding import Findings
from streamppo.commands.checks.folder import find
from streamppo.commands.checks.task import ROWS
from streamppo.config.model import BUILTIN
from streamppo.config.sections import Config
from streamppo.errors import ModelError
from streamppo.tasks.task import Task
from streamppo.types import Prompt
from streamppo.weights.models import folder as folders

TEMPLATE = 256
"""Tokens that a chat template adds at most, about."""


def findings(config: Config, task: Task) -> Findings:
    """Find that no prompt leaves room in the context of a model on this machine."""
    bound = _positions(config)
    if bound is None or any(_bytes(prompt) + TEMPLATE < bound for prompt in task.training[:ROWS]):
        return
    # Slow to import, and most prompts are short.
    from streamppo.commands.checks import ends, model

    loaded, _ = model.load(config, None)
    if loaded.hf_config is None or loaded.tokenizer is None:
        return
    # max_prompt_tokens leaves out some.
    used = tasks.load(config, loaded.tokenizer, limit=ROWS)
    if used.task is not None:
        yield from ends.context(used.task, loaded.hf_config, loaded.tokenizer)


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
