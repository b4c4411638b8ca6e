"""The room that prompts leave in the model's context, looked at before a run that is to start without a wait.

A token has at least one byte, so where the bytes of a prompt fit its tokens do: transformers is imported, which takes
seconds, only where all of the first prompts are longer than that.
"""

from pathlib import Path

from streamppo.commands.checks import task as tasks
from streamppo.commands.checks.finding import Findings
from streamppo.commands.checks.folder import find
from streamppo.commands.checks.task import ROWS
from streamppo.config.sections import BUILTIN, Config
from streamppo.errors import ModelError
from streamppo.tasks.task import Task
from streamppo.types import Prompt
from streamppo.weights.models import folder as folders

TEMPLATE = 256
"""Tokens that a chat template adds at most, about."""


def findings(config: Config, task: Task) -> Findings:
    """Find prompts that all leave no room in the context of a model that is here."""
    bound = _positions(config)
    if bound is None or any(_bytes(one) + TEMPLATE < bound for one in task.training[:ROWS]):
        return
    # Slow to import, and most prompts are short.
    from streamppo.commands.checks import ends, model

    loaded, _ = model.load(config)
    if loaded.hf_config is None or loaded.tokenizer is None:
        return
    # Without those that max_prompt_tokens leaves out.
    used, _ = tasks.load(config, loaded.tokenizer, limit=ROWS)
    if used is not None:
        yield from ends.context(used, loaded.hf_config, loaded.tokenizer)


def _positions(config: Config) -> int | None:
    """The positions of the model; None of one that is made, that is not here, or that names no number of them."""
    folder = None if config.model.path == BUILTIN else find(config.model.path, "model")[0]
    if folder is None:
        return None
    try:
        settings = folders.kind(Path(folder))
    except ModelError:
        return None
    text = settings.get("text_config")
    found = (text if isinstance(text, dict) else settings).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _bytes(prompt: Prompt) -> int:
    return len((prompt.text + "".join(one.text for one in prompt.messages)).encode(errors="surrogatepass"))
