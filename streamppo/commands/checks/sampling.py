"""Checks of sampling: the settings of generation_config.json that are not followed. No torch, no transformers."""

import json
from collections.abc import Mapping
from pathlib import Path

from streamppo import durable
from streamppo.commands.checks.finding import Finding, Findings, first_line
from streamppo.commands.checks.folder import find
from streamppo.config.model import BUILTIN
from streamppo.config.sections import Config

NEUTRAL: Mapping[str, object] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "bad_words_ids": [],
    "sequence_bias": {},
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "stop_strings": [],
}
"""Settings of transformers that change the sampled token or the end of a completion, and their neutral values."""
NONE: tuple[object, ...] = (None, [], {}, "")


def name_ignored(config: Config) -> Findings:
    """Note the settings of generation_config.json that sampling does not follow."""
    if config.model.path == BUILTIN:
        return
    folder, _ = find(config.model.path, "model")
    try:
        settings = {} if folder is None else _read(Path(folder) / "generation_config.json")
    except (OSError, ValueError, RecursionError) as error:
        text = f"generation_config.json is left out, with the ends of completions that it names: {first_line(error)}"
        yield Finding("sampling", "note", text)
        return
    rollout = config.rollout
    same: dict[str, object] = {
        **NEUTRAL,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
    }
    others = {name: value for name, value in settings.items() if name in same and not _equal(value, same[name])}
    if others:
        named = ", ".join(f"{name} {json.dumps(value)}"[:60] for name, value in others.items())
        yield Finding(
            "sampling",
            "note",
            f"the model's generation_config.json has {named}, which is not followed: tokens are sampled with [rollout] "
            f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, top_k {rollout.top_k} and nothing else, "
            "for the learner's log-probs are of that distribution",
        )


def _equal(value: object, wanted: object) -> bool:
    return value == wanted or (value in NONE and wanted in (*NONE, 0, 1)) or (value is False and wanted is None)


def _read(path: Path) -> Mapping[str, object]:
    """Read the settings; none if there is no file. Raises OSError, ValueError or RecursionError for a damaged one."""
    try:
        settings: object = json.loads(durable.read(path))
    except FileNotFoundError:
        return {}
    if not isinstance(settings, Mapping):
        raise ValueError("it is not a table of names")
    return settings
