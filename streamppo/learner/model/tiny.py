"""builtin:tiny: a Qwen2 model of 0.1 to 1M parameters with a character tokenizer, made from the seed.

Reinforcement learning needs rewards that are not all zero, so a short supervised warm start trains the model on the
format and some right answers. The model's tokens are the task's characters (tasks/warmup_data.py).
"""

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamppo.config.model import BUILTIN, HEAD_WIDTH, Model, Tiny
from streamppo.config.sections import Config
from streamppo.learner.model import hf_files
from streamppo.tasks import warmup_data
from streamppo.tasks.tokenizer import END, PADDING, character_tokenizer
from streamppo.telemetry import host

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

IGNORED = -100
INIT_STD = 0.09
"""The std of initial weights, near that of trained weights of this width; with 0.02 addition is learned much later."""
QK_BIAS_STD = 1.0
"""The std of random biases of queries and keys, by which heads attend to positions (rotary embedding) at once."""
CHECKED = 512
"""The number of training problems in a check of the warm start; fewer if the problems are long."""
CHECK_EVERY = 2
BATCH_SIZE = 256
"""The number of problems in a supervised step; fewer if the problems are long."""
LONG = 32
"""If a problem and its answer have more tokens, a step has fewer problems, so that all steps take equally long."""
LR = 5e-3
MOST_THREADS = 4
"""Maximum threads for supervised steps. The model is bit for bit the same with any number of threads."""
WARM_UP_STEPS = 10
PROGRESS_S = 5.0

log = logging.getLogger(__name__)


def make(config: Config, folder: Path) -> None:
    """Make, warm up and save the model. Raises `TaskError` for a task outside the limits of `warmup_data.prepare`."""
    from transformers import Qwen2ForCausalLM

    lesson = warmup_data.prepare(config)
    log.info(
        f"making {BUILTIN}: {len(lesson.alphabet)} characters, up to {config.model.tiny.max_steps} supervised steps "
        f"on {len(lesson.problems)} prompts with answers"
    )
    torch.manual_seed(config.seed)
    tokenizer = character_tokenizer(lesson.alphabet)
    model = Qwen2ForCausalLM(settings(config.model, len(tokenizer)))
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            torch.nn.init.normal_(parameter, std=QK_BIAS_STD)
    with _threads(min(MOST_THREADS, host.cores())):
        _warm_up(model, tokenizer, lesson, config.model.tiny, config.seed)
    hf_files.write(model, tokenizer, folder)


def settings(config: Model, vocabulary: int) -> "Qwen2Config":
    """The model's Hugging Face configuration, with `vocabulary` tokens."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=config.tiny.hidden_size,
        intermediate_size=config.tiny.hidden_size * 2,
        num_hidden_layers=config.tiny.layers,
        num_attention_heads=config.tiny.hidden_size // HEAD_WIDTH,
        num_key_value_heads=config.tiny.hidden_size // HEAD_WIDTH,
        max_position_embeddings=warmup_data.CONTEXT,
        tie_word_embeddings=False,
        initializer_range=INIT_STD,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PADDING,
    )


@contextmanager
def _threads(number: int) -> Generator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Problems(NamedTuple):
    """Right-padded prompts with answers [N, L]; labels, only on answers and their end token; and lengths in tokens."""

    inputs_NL: Tensor
    labels_NL: Tensor
    length_N: Tensor

    def at(self, rows: Tensor | slice) -> "Problems":
        """Select the problems at `rows`, cut to the longest of them."""
        width = int(self.length_N[rows].max())
        return Problems(self.inputs_NL[rows, :width], self.labels_NL[rows, :width], self.length_N[rows])


def _warm_up(
    model: "Qwen2ForCausalLM", tokenizer: "PreTrainedTokenizerBase", lesson: warmup_data.Lesson, config: Tiny, seed: int
) -> None:
    """Train on answers until greedy accuracy reaches the target, for at most `max_steps` steps."""
    generator, problems = np.random.default_rng((seed, 0x3A23)), _encode(tokenizer, lesson)
    # A step has fewer problems if they are long, so that memory and time do not grow with their length.
    part = min(1.0, LONG / lesson.longest)
    checked = problems.at(slice(max(1, int(CHECKED * part))))
    count, batch_size = len(problems.length_N), max(1, int(BATCH_SIZE * part))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    logged_at, accuracy, step_accuracy = time.monotonic(), 0.0, 0.0
    for step in range(config.max_steps):
        # Below half of the target accuracy a check, which costs as much as a step, cannot pass.
        if step % CHECK_EVERY == 0 and _may_pass(step_accuracy, config.target_accuracy):
            accuracy = _accuracy(model, checked)
            if accuracy >= config.target_accuracy:
                break
        if time.monotonic() - logged_at > PROGRESS_S:
            logged_at = time.monotonic()
            log.info(f"{BUILTIN}: supervised step {step}/{config.max_steps}, {step_accuracy:.0%} of answers right")
        batch = problems.at(torch.from_numpy(generator.integers(count, size=batch_size)))
        logits_BLV = _logits(model, batch)
        step_accuracy = _greedy_accuracy(logits_BLV.detach(), batch)
        columns = logits_BLV[:, :-1].flatten(0, 1), batch.labels_NL[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(*columns, ignore_index=IGNORED)
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / WARM_UP_STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        accuracy = _accuracy(model, checked)
    log.info(f"{BUILTIN} is made: about {accuracy:.0%} of its answers to training prompts are right")


def _may_pass(step_accuracy: float, target: float) -> bool:
    return step_accuracy >= target / 2


def _encode(tokenizer: "PreTrainedTokenizerBase", lesson: warmup_data.Lesson) -> Problems:
    prompts = tokenizer([problem.text for problem in lesson.problems])["input_ids"]
    answers = tokenizer([problem.columns["answer"] for problem in lesson.problems])["input_ids"]
    rows = [(prompt, [*answer, tokenizer.eos_token_id]) for prompt, answer in zip(prompts, answers, strict=True)]
    inputs = np.zeros((len(rows), max(len(prompt) + len(answer) for prompt, answer in rows)), dtype=np.int64)
    labels = np.full(inputs.shape, IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        inputs[row, :end] = prompt + answer
        labels[row, len(prompt) : end] = answer
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in rows])
    return Problems(torch.from_numpy(inputs), torch.from_numpy(labels), lengths)


def _logits(model: "Qwen2ForCausalLM", problems: Problems) -> Tensor:
    logits_BLV = model(input_ids=problems.inputs_NL, use_cache=False).logits
    assert logits_BLV is not None, "a causal LM has logits"
    return logits_BLV


@torch.no_grad()
def _accuracy(model: "Qwen2ForCausalLM", problems: Problems) -> float:
    return _greedy_accuracy(_logits(model, problems), problems)


def _greedy_accuracy(logits_BLV: Tensor, problems: Problems) -> float:
    best_BL = logits_BLV[:, :-1].argmax(-1)
    label_BL = problems.labels_NL[:, 1:]
    right_BL = (best_BL == label_BL) | (label_BL == IGNORED)
    return right_BL.all(dim=1).float().mean().item()
