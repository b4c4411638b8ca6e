"""Reads a run's token limits from its configuration and from the model's config.json."""

# transformers leaves parts of its signatures untyped, and does not list all its exports.
# pyright: standard

import json
from pathlib import Path

from streamppo import durable
from streamppo.config.sections import Config, longest_completion
from streamppo.config.task import DataTask
from streamppo.errors import ModelError
from streamppo.queue.rules.validation import TokenLimits


def read_token_limits(config: Config, model_path: str) -> TokenLimits:
    """Read the limits from the configuration and the model's config.json. Raises `ModelError`."""
    sources = config.task.sources.values() if isinstance(config.task, DataTask) and config.environment is None else ()
    try:
        settings = json.loads(durable.read(_config_file(model_path)))
        # Multimodal models have the settings of their text model in `text_config`.
        vocabulary = int({**settings, **settings.get("text_config", {})}["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{model_path}: its config.json does not say how many tokens it has: {error!r}") from error
    return TokenLimits(
        vocabulary=vocabulary,
        completion=longest_completion(config),
        prompt=max((source.max_prompt_tokens for source in sources), default=None),
        candidates=config.rollout.excludes_tokens,
        components=config.algorithm.compared_components,
        teacher=bool(config.algorithm.teacher.url),
        routes=config.rollout.engine.routes,
        linear=config.linear,
    )


def _config_file(model_path: str) -> Path:
    if (folder := Path(model_path)).is_dir():
        # The queue needs transformers only for a hub name, and importing it takes most of a second.
        return folder / "config.json"
    from transformers.utils.hub import cached_file

    return Path(str(cached_file(model_path, "config.json")))
