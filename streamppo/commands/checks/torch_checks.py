"""Checks with torch and transformers: tokenizer, lengths of prompts, scores of rows, memory."""

from collections.abc import Sequence

import transformers

from streamppo.commands.checks import lengths, memory, model, rows, turns
from streamppo.commands.checks import task as tasks
from streamppo.commands.checks.finding import Finding
from streamppo.commands.checks.task import LoadedTask
from streamppo.config.sections import Config
from streamppo.learner.parallel import context_parallel, tensor_parallel


def add(
    findings: Sequence[Finding], config: Config, untokenized: LoadedTask, gpu_gib: float | None, *, call: bool
) -> list[Finding]:
    """Add to the light `findings` those of the model, of the tokenized task, and of memory.

    `untokenized` is the task without a tokenizer. Rewards are called on a few rows if `call` is true.
    """
    transformers.utils.logging.set_verbosity_error()
    (hf_config, tokenizer), model_findings = model.load(config, untokenized.lesson)
    findings = [*findings, *model_findings]
    if not any(finding.state == "error" for finding in model_findings):
        findings += model.files(config)
    characters = None if untokenized.lesson is None else rows.characters(untokenized.lesson)
    task = untokenized.task
    if tokenizer is not None:
        task, task_findings, _ = tasks.load(config, tokenizer)
        findings = [finding for finding in findings if finding.subject not in ("task", "context")] + task_findings
        if task is not None:
            findings += lengths.answers(config, task, tokenizer)
            findings += turns.findings(config, task, tokenizer, call=call)
    elif task is not None and config.environment is not None and characters is not None:
        findings += turns.findings(config, task, characters, call=call)
    if task is not None:
        findings += rows.score(config, task, tokenizer or characters, call=call)
    if hf_config is None:
        return findings
    if tokenizer is not None:
        findings += model.ends(config, hf_config, tokenizer)
        if task is not None:
            findings += lengths.prompts(task, hf_config, tokenizer)
    findings += model.rows(config, hf_config)
    mesh = config.learner.mesh
    for refusal in (context_parallel.refusal(hf_config, mesh.slices), tensor_parallel.refusal(hf_config, mesh.expert)):
        if refusal:
            findings.append(Finding("mesh", "error", refusal))
    findings += memory.memory(config, hf_config, memory.gpu(gpu_gib))
    return findings
