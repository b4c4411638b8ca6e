"""Checks with torch and transformers: tokenizer, lengths of prompts, scores of rows, memory."""

from collections.abc import Sequence

import transformers

from streamppo.commands.checks import ends, memory, model, rows, task, turns, weights
from streamppo.commands.checks.answers import answers
from streamppo.commands.checks.finding import Finding
from streamppo.commands.checks.task import LoadedTask
from streamppo.config.sections import Config
from streamppo.learner.parallel import context_parallel, tensor_parallel


def add(
    findings: Sequence[Finding], config: Config, of_files: LoadedTask, gpu_gib: float | None, *, call: bool
) -> list[Finding]:
    """Add to the quick `findings` those of the model, of the tokenized task, and of memory.

    `of_files` is the task without a tokenizer. Rewards are called on a few rows if `call` is true.
    """
    transformers.utils.logging.set_verbosity_error()
    loaded, added = model.load(config, of_files.lesson)
    all_findings = [*findings, *added]
    if not any(finding.state == "error" for finding in added):
        all_findings += weights.findings(config)
    characters = None if of_files.lesson is None else rows.characters(of_files.lesson)
    prompts = of_files.task
    if loaded.tokenizer is not None:
        prompts, of_task, _ = task.load(config, loaded.tokenizer)
        all_findings = [finding for finding in all_findings if finding.subject not in ("task", "context")] + of_task
        if prompts is not None:
            all_findings += answers(config, prompts, loaded.tokenizer)
            all_findings += turns.findings(config, prompts, loaded.tokenizer, call=call)
    elif prompts is not None and config.environment is not None and characters is not None:
        all_findings += turns.findings(config, prompts, characters, call=call)
    if prompts is not None:
        all_findings += rows.score(config, prompts, loaded.tokenizer or characters, call=call)
    if loaded.hf_config is not None:
        if loaded.tokenizer is not None:
            all_findings += ends.ends(config, loaded.hf_config, loaded.tokenizer)
            if prompts is not None:
                all_findings += ends.context(prompts, loaded.hf_config, loaded.tokenizer)
        all_findings += ends.rows(config, loaded.hf_config)
        mesh = config.learner.mesh
        for refused in (
            context_parallel.refusal(loaded.hf_config, mesh.slices),
            tensor_parallel.refusal(loaded.hf_config, mesh.expert),
        ):
            if refused:
                all_findings.append(Finding("mesh", "error", refused))
        all_findings += memory.memory(config, loaded.hf_config, memory.gpu(gpu_gib))
    return all_findings
