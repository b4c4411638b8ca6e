"""TRL's GRPOTrainer on the task and with the settings of a configuration: the TRL side of beside_trl.py.

    python benchmarks/lib/trl_run.py JOB.json      one JSON line on stdout for each update and each evaluation

TRL gets its fastest settings for this task: float32, one optimizer step on the whole batch without a pass for old
log-probs (with several `steps` on parts of the batch there is one), no reference model, no gradient checkpointing, no
checkpoint, no progress bar, no log. Evaluations do not count in the measured times. Negative advantages are multiplied
by `algorithm.negative_weight`, for which TRL has no setting. With drawn lengths its `rollout_func` calls the model's
`generate`, as the trainer itself does, with a criterion that stops each row at its length.
"""

import asyncio
import contextlib
import json
import pkgutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import lengths
from streamppo.config import file as configfile
from streamppo.config.learner import Learner
from streamppo.config.sections import Config
from streamppo.tasks import task as tasks
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Prompt, ScoredText

NEVER = 10**9


class Job(msgspec.Struct, frozen=True):
    """One training. `begin` is the start time of the command, `shape` the shape of drawn lengths, if any.

    `overrides` are those of the configuration. `scorer` is the reward, by default the exact answer of lengths.py.

    An update makes `steps` optimizer steps, each in `parts` micro-batches. The training ends at `updates` or
    `stop_after`, at the evaluation that reaches `target`, or after `limit_s` seconds without evaluations. The learning
    rate decays over `updates`, also if the training ends earlier.
    """

    config: str
    overrides: tuple[str, ...]
    model: str
    threads: int
    begin: float
    scorer: str = ""
    parts: int = 1
    steps: int = 1
    shape: str = ""
    reward_s: float = 0.0
    updates: int = 1100
    stop_after: int = NEVER
    evaluate_every: int = 20
    target: float = 1.0
    limit_s: float = 1e9


class Clock:
    """Wall seconds since the command started, and CPU seconds of this process; evaluations do not count."""

    def __init__(self, begin: float) -> None:
        self._offset = begin - time.time()
        self._start, self._paused = time.perf_counter(), (0.0, 0.0)

    def read(self) -> tuple[float, float]:
        """Return (wall, CPU)."""
        wall_s, cpu_s = time.perf_counter() - self._start - self._offset, time.process_time()
        return wall_s - self._paused[0], cpu_s - self._paused[1]

    @contextlib.contextmanager
    def paused(self) -> Any:
        """Stop both times in the block."""
        (wall_s, cpu_s), (paused_wall_s, paused_cpu_s) = self.read(), self._paused
        yield
        until_wall_s, until_cpu_s = self.read()
        self._paused = paused_wall_s + until_wall_s - wall_s, paused_cpu_s + until_cpu_s - cpu_s


def main() -> None:
    """Train one job."""
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    clock = Clock(job.begin)
    import torch

    torch.set_num_threads(job.threads)
    _trainer(job, configfile.load(Path(job.config), job.overrides), clock).train()


def _trainer(job: Job, config: Config, clock: Clock) -> Any:
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    task = tasks.build(config.task, config.seed, Tokenizer(job.model) if job.scorer else None)
    count = config.queue.batch_size // config.queue.samples_per_prompt * min(job.updates, job.stop_after)
    rows = [_row(task.prompt(number)) for number in range(count)]
    held_out = [_row(prompt) for prompt in task.held_out(config.evaluation.prompts)]

    class Weighted(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = super()._generate_and_score_completions(inputs)
            advantages, weight = made["advantages"], config.algorithm.negative_weight
            return {**made, "advantages": torch.where(advantages < 0, weight * advantages, advantages)}

    trainer = Weighted(
        model=model,
        args=_settings(job, config),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=_scored(job.scorer) if job.scorer else _reward(job.reward_s),
        rollout_func=_rollout(job.shape, config.queue.samples_per_prompt) if job.shape else None,
    )
    if job.scorer:
        accuracy = partial(_scored_accuracy, model, tokenizer, held_out, job.scorer, config.rollout.max_tokens)
    else:
        accuracy = partial(_accuracy, model, tokenizer, held_out)
    trainer.add_callback(_observer(job, clock, accuracy))
    return trainer


def _row(prompt: Prompt) -> dict[str, Any]:
    messages = [{"role": one.role, "content": one.content} for one in prompt.messages]
    return {"prompt": messages or prompt.text, "answer": str(prompt.columns["answer"])}


def _settings(job: Job, config: Config) -> Any:
    """Map the configuration to TRL's. The loss type "dapo" is the mean over all tokens of the batch."""
    from trl import GRPOConfig  # pyright: ignore[reportMissingImports]

    learner, algorithm, queue = config.learner, config.algorithm, config.queue
    return GRPOConfig(
        output_dir=str(Path(job.model).parent / "trl"),
        max_steps=job.updates * job.steps,
        per_device_train_batch_size=queue.batch_size // (job.parts * job.steps),
        gradient_accumulation_steps=job.parts,
        steps_per_generation=job.parts * job.steps,
        num_generations=queue.samples_per_prompt,
        max_completion_length=lengths.LONGEST if job.shape else config.rollout.max_tokens,
        temperature=config.rollout.temperature,
        top_p=1.0,
        top_k=0,
        shuffle_dataset=False,
        learning_rate=learner.lr,
        adam_beta1=learner.betas[0],
        adam_beta2=learner.betas[1],
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        warmup_steps=learner.warmup_updates * job.steps,
        **_schedule(learner),
        loss_type="dapo",
        scale_rewards="group",
        entropy_coef=algorithm.entropy,
        beta=0.0,
        num_iterations=1,
        seed=config.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def _schedule(learner: Learner) -> dict[str, Any]:
    """Map the schedule of the learning rate after the warm-up."""
    match learner.decay:
        case "constant":
            return {"lr_scheduler_type": "constant_with_warmup"}
        case "linear":
            end = {"lr_end": learner.lr * learner.final_lr_share, "power": 1.0}
            return {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": end}
        case "cosine":
            raise ValueError("TRL's cosine decay has no final rate: use another learner.decay")


def _reward(seconds: float) -> Callable[..., Any]:
    """Make the reward of the task; the completions wait `seconds` each, concurrently."""

    async def right(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: object) -> Any:
        async def one(ids: list[int], text: str, wanted: str) -> float:
            await asyncio.sleep(seconds)
            return float(lengths.is_right(ids, text, wanted))

        if not seconds:
            return [float(lengths.is_right(*each)) for each in zip(completion_ids, completions, answer, strict=True)]
        return await asyncio.gather(*map(one, completion_ids, completions, answer))

    return right


def _scored(scorer: str) -> Callable[..., Any]:
    """Make the reward of a scorer of streamppo, `module:function`."""
    function = pkgutil.resolve_name(scorer)

    async def score(completions: list[Any], answer: list[str], **_: object) -> list[float]:
        written = (one if isinstance(one, str) else one[-1]["content"] for one in completions)
        texts = (ScoredText(prompt="", completion=text, finish="stop", num_tokens=1) for text in written)
        return [await function(text, one) for text, one in zip(texts, answer, strict=True)]

    return score


def _rollout(shape: str, samples: int) -> Callable[..., Any]:
    """Make the rollout function; completions have the lengths of the same prompts and samples in streamppo's run."""
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class Drawn(StoppingCriteria):
        def __init__(self, limits: torch.Tensor, prompt_tokens: int) -> None:
            self._ends = limits + prompt_tokens

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
            return self._ends <= input_ids.shape[1]

    done = 0

    def roll(prompts: list[str], trainer: Any) -> dict[str, Any]:
        nonlocal done
        limits = [lengths.draw(shape, *divmod(done + n, samples)) for n in range(len(prompts))]
        done += len(prompts)
        # The trainer has set the tokenizer's end-of-sequence token in the model.
        trainer.model.generation_config.eos_token_id = None
        encoded = trainer.processing_class(prompts, return_tensors="pt", padding=True)
        settings = GenerationConfig(
            max_new_tokens=max(limits), do_sample=True, top_k=0, pad_token_id=trainer.processing_class.pad_token_id
        )
        width = encoded["input_ids"].shape[1]
        with torch.no_grad():
            made = trainer.model.generate(
                **encoded,
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([Drawn(torch.tensor(limits), width)]),
            )
        rows = made[:, width:].tolist()
        ids = [row[:limit] for row, limit in zip(rows, limits, strict=True)]
        return {"prompt_ids": trainer.processing_class(prompts)["input_ids"], "completion_ids": ids, "logprobs": None}

    return roll


def _accuracy(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> float:
    """The share of held-out problems that the model answers right, greedily."""
    ids, texts = _greedy(model, tokenizer, rows, lengths.SHORTEST)
    right = [lengths.is_right(one, text, row["answer"]) for one, text, row in zip(ids, texts, rows, strict=True)]
    return sum(right) / len(right)


def _scored_accuracy(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], scorer: str, longest: int) -> float:
    """The share of held-out problems whose greedy answer the scorer gives a 1."""
    _, texts = _greedy(model, tokenizer, rows, longest)
    scores = asyncio.run(_scored(scorer)(texts, [row["answer"] for row in rows]))
    return sum(score == 1.0 for score in scores) / len(scores)


def _greedy(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], longest: int
) -> tuple[list[list[int]], list[str]]:
    """Return tokens and text of each greedy completion."""
    import torch
    from transformers import GenerationConfig

    prompts = [row["prompt"] for row in rows]
    if not isinstance(prompts[0], str):
        prompts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    settings = GenerationConfig(max_new_tokens=longest, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    with torch.no_grad():
        made = model.generate(**encoded, generation_config=settings)
    ids = made[:, encoded["input_ids"].shape[1] :].tolist()
    return ids, tokenizer.batch_decode(ids, skip_special_tokens=True)


def _observer(job: Job, clock: Clock, accuracy: Callable[[], float]) -> Any:
    from transformers import TrainerCallback

    class Observer(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._look(0, control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            update, inside = divmod(state.global_step, job.steps)
            if inside:
                return
            wall_s, cpu_s = clock.read()
            _tell(update=update, wall_s=wall_s, cpu_s=cpu_s)
            if update % job.evaluate_every == 0:
                self._look(update, control)
            if update >= job.stop_after or wall_s > job.limit_s:
                control.should_training_stop = True

        def _look(self, update: int, control: Any) -> None:
            with clock.paused():
                found = accuracy()
            _tell(evaluation=update, wall_s=clock.read()[0], accuracy=found)
            if found >= job.target:
                control.should_training_stop = True

    return Observer()


def _tell(**line: float) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
