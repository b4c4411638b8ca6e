"""Hints about an unknown name in the configuration: a typo, a field of another table, another trainer's name.

queue.batch_sizes        did you mean 'batch_size'?                  a similar name of the same table
lr                       did you mean 'learner.lr'?                  the name of a field elsewhere
num_generations          did you mean 'queue.samples_per_prompt'?    TRL's, verl's or OpenRLHF's name of a field
algorithm.advantage.lam  kind "gae" and kind "vtrace" have it        a field of another kind of the same table
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple, cast

from msgspec import inspect

from streamppo.config.overrides import Tree, leaves
from streamppo.config.sections import Config

TYPO, NEAR, ELSEWHERE = 0.85, 0.5, 0.8
"""Least similarities of two names for a hint: for a typo, for names of one table, for names of two tables."""
MOST = 3
"""Maximum number of fields in one hint."""
SHORT = {"reward.scorers": ("reward", ""), "task.sources": ("task", "data")}
"""{table: (outer table, its kind)}: if the table has only one entry, the outer table may have this entry's fields."""
ALIASES = {
    "algorithm.advantage": "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo",
    "algorithm.advantage.gamma": "gamma discount",
    "algorithm.advantage.lam": "lam lambd gae_lambda",
    "algorithm.aggregation": "loss_agg_mode",
    "algorithm.correction": "use_tis rollout_is vllm_importance_sampling_correction",
    "algorithm.correction.cap": "tis_cap rollout_is_threshold vllm_importance_sampling_cap importance_sampling_cap",
    "algorithm.critic.clip": "cliprange_value value_clip",
    "algorithm.critic.coefficient": "vf_coef value_loss_coef",
    "algorithm.critic.lr": "critic_learning_rate critic.optim.lr critic.lr",
    "algorithm.critic.model": "critic_pretrain critic.model.path value_model_path",
    "algorithm.entropy": "entropy_coeff entropy_coef ent_coef entropy_beta",
    "algorithm.filters": "mask_truncated_completions overlong_filtering",
    "algorithm.kl.loss_beta": "beta kl_beta kl_loss_coef use_kl_loss",
    "algorithm.kl.reward_beta": "kl_coef init_kl_coef kl_ctrl.kl_coef use_kl_in_reward",
    "algorithm.kl.loss_estimator": "kl_loss_type kl_estimator",
    "algorithm.policy_loss": "loss_type loss_mode policy_loss.loss_mode",
    "algorithm.policy_loss.range": (
        "epsilon epsilon_high cliprange clip_range clip_ratio clip_ratio_low clip_ratio_high eps_clip clip_eps"
    ),
    "algorithm.policy_loss.dual": "clip_ratio_c dual_clip",
    "algorithm.teacher.model": "teacher_model_name_or_path teacher_model",
    "algorithm.whiten": "whiten_advantages whiten_rewards normalize_advantages",
    "algorithm.zero_variance": "filter_groups dynamic_sampling dynamic_filtering",
    "checkpoint.every": "save_steps save_freq save_every save_interval",
    "checkpoint.keep": "save_total_limit max_ckpt_to_keep max_actor_ckpt_to_keep max_ckpt_num",
    "environment.agent": "workflow agent_workflow",
    "environment.max_turns": "max_assistant_turns max_tool_calling_iterations",
    "environment.name": "env env_name",
    "evaluation.every": "eval_steps test_freq eval_every eval_freq",
    "evaluation.prompts": "val_batch_size eval_batch_size per_device_eval_batch_size",
    "learner.betas": "adam_beta1 adam_beta2 adam_betas",
    "learner.decay": "lr_scheduler_type lr_scheduler warmup_style",
    "learner.epochs": "num_iterations ppo_epochs num_ppo_epochs",
    "learner.lr": "learning_rate actor_learning_rate optim.lr optimizer.lr",
    "learner.max_grad_norm": "grad_clip clip_grad max_norm gradient_clipping",
    "learner.micro_batch_tokens": (
        "gradient_accumulation_steps micro_batch_size micro_train_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu"
    ),
    "learner.minibatches": "ppo_mini_batch_size mini_batch_size num_mini_batches steps_per_generation",
    "learner.offload": "param_offload optimizer_offload cpu_offload adam_offload",
    "learner.ranks": "n_gpus_per_node num_gpus num_processes actor_num_gpus_per_node",
    "learner.warmup_updates": "warmup_steps warmup_ratio lr_warmup_steps lr_warmup_steps_ratio lr_warmup_ratio",
    "model.attention": "attn_implementation flash_attn",
    "model.dtype": "bf16 fp16 torch_dtype",
    "model.gradient_checkpointing": "enable_gradient_checkpointing activation_checkpointing",
    "model.lora": "use_peft use_lora peft_config",
    "model.lora.alpha": "lora_alpha",
    "model.lora.rank": "lora_r lora_rank",
    "model.lora.targets": "target_modules lora_target_modules",
    "model.path": "model_name_or_path model_name pretrain hf_checkpoint",
    "name": "run_name experiment_name exp_name output_dir",
    "queue.batch_size": (
        "train_batch_size per_device_train_batch_size rollout_batch_size generation_batch_size global_batch_size"
    ),
    "queue.max_lag": (
        "staleness staleness_threshold max_staleness max_off_policy_steps max_async_level max_head_offpolicyness"
    ),
    "queue.samples_per_prompt": (
        "num_generations rollout.n n_samples_per_prompt num_samples_per_prompt group_size num_return_sequences"
    ),
    "reward.function": (
        "reward_funcs reward_func reward_function reward_fn custom_reward_function custom_rm_path "
        "custom_reward_function.path"
    ),
    "reward.url": "remote_rm_url remote_url",
    "rollout.actors": "num_rollout_workers vllm_num_engines",
    "rollout.engine": "use_vllm vllm_mode rollout.name backend",
    "rollout.engine.mem_fraction_static": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "rollout.gpus": "tensor_model_parallel_size tensor_parallel_size tp_size vllm_tensor_parallel_size",
    "rollout.max_tokens": (
        "max_tokens max_completion_length max_new_tokens max_response_length response_length generate_max_len"
    ),
    "rollout.slots": "max_num_seqs max_running_requests",
    "task.answer": "label_key answer_key",
    "task.chat": "apply_chat_template",
    "task.data": "train_files train_file train_dataset dataset dataset_name data_path prompt_data",
    "task.evaluation": "val_files eval_data eval_dataset",
    "task.max_prompt_tokens": "max_prompt_length prompt_max_len max_prompt_len",
    "task.prompt": "prompt_key input_key",
    "telemetry.project": "project_name wandb_project",
    "telemetry.trackers": "report_to logger use_wandb",
    "updates": "max_steps total_training_steps num_train_epochs total_epochs num_episodes num_epochs",
}
"""Names of each field in other trainers, separated by spaces. A name is dotted if its last part is ambiguous."""
MEANING = {
    "algorithm.advantage": 'a kind: "gae", "grpo", or "dr_grpo", which does not divide by the standard deviation',
    "algorithm.policy_loss.range": "two distances from 1, such as [0.2, 0.2]",
    "learner.micro_batch_tokens": "in tokens of a rank; gradients accumulate automatically",
    "learner.minibatches": "their number in an epoch, not their size",
    "queue.batch_size": "all completions of one update, over all ranks",
    "queue.max_lag": "in versions",
    "reward.url": 'of a server of OpenRLHF with kind = "service" and form = "openrlhf"',
    "updates": "updates, not epochs",
}
"""Units and values of fields for which other trainers may use others."""


class Field(NamedTuple):
    """A field or table: its dotted name, the kind of its table ("" if the table has no kinds), and its depth."""

    name: str
    kind: str
    depth: int

    @property
    def key(self) -> str:
        return self.name.rpartition(".")[2]


def unknown(name: str, value: object, known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, sentence) for the unknown `name`, or for each field in it; `known` are the known names."""
    key, names = name.rpartition(".")[2], sorted(known)
    hint = nearest(key, names, TYPO) or _alias(name)
    if not hint and isinstance(value, dict):
        fields = (field for field, _ in leaves(cast(Tree, value), f"{name}."))
        messages = {field: _alias(field) or _elsewhere(field) for field in fields}
        if any(messages.values()):
            yield from ((field, _sentence(field, message)) for field, message in messages.items())
            return
    hint = hint or _elsewhere(name) or nearest(key, names) or _nearly_elsewhere(key)
    yield name, _sentence(name, hint or (f": known here are {join_names(names)}" if names else ""))


def nearest(name: str, known: Iterable[str], cutoff: float = NEAR) -> str:
    """Return a hint with the name in `known` that is most similar to `name`; "" if none is similar."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f": did you mean {near[0]!r}?" if near else ""


def join_names(names: Sequence[str], last: str = "and") -> str:
    """Join names for a sentence: "a, b and c"."""
    return f" {last} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _sentence(name: str, hint: str) -> str:
    return f"unknown field {name.rpartition('.')[2]!r}{hint}"


def _alias(name: str) -> str:
    """Return a hint from the longest suffix of the dotted `name` that is in `ALIASES`; "" if none is."""
    parts = name.split(".")
    for begin in range(len(parts)):
        if field := _aliases().get(".".join(parts[begin:])):
            unit = f" ({MEANING[field]})" if field in MEANING else ""
            return f": did you mean {field!r}{unit}?" if field != name else ""
    return ""


def _elsewhere(name: str) -> str:
    """Return a hint about fields of the same name in other kinds of the table or in other tables."""
    key = name.rpartition(".")[2]
    same = [field for field in _fields() if field.key == key]
    if kinds := [f'kind "{field.kind}"' for field in same if field.kind and field.name == name]:
        return f": {join_names(list(dict.fromkeys(kinds)))} {'has' if len(kinds) == 1 else 'have'} it"
    depth = min((field.depth for field in same), default=0)
    shallow = list(dict.fromkeys(repr(field.name) for field in same if field.depth == depth))
    return f": did you mean {join_names(shallow[:MOST], 'or')}?" if shallow else ""


def _nearly_elsewhere(key: str) -> str:
    names = {field.key: field.name for field in reversed(_fields())}
    near = difflib.get_close_matches(key, names, n=1, cutoff=ELSEWHERE)
    return f": did you mean {names[near[0]]!r}?" if near else ""


@cache
def _aliases() -> dict[str, str]:
    return {name: field for field, names in ALIASES.items() for name in names.split()}


@cache
def _fields() -> tuple[Field, ...]:
    """Return every field and table of the configuration by its name in a file, in the order of the sections."""
    return tuple(dict.fromkeys(map(_short, _below(inspect.type_info(Config), ""))))


def _below(node: inspect.Type, at: str) -> Iterator[Field]:
    match node:
        case inspect.StructType(fields=fields, tag=tag):
            for field in fields:
                name = f"{at}.{field.encode_name}" if at else field.encode_name
                yield Field(name, str(tag or ""), name.count("."))
                yield from _below(field.type, name)
        case inspect.UnionType(types=types):
            for option in types:
                yield from _below(option, at)
        case inspect.DictType(value_type=value):
            yield from _below(value, f"{at}.NAME")
        case inspect.VarTupleType(item_type=item):
            yield from _below(item, at)
        case _:
            return


def _short(field: Field) -> Field:
    for table, (short, kind) in SHORT.items():
        if field.name.startswith(f"{table}.NAME."):
            return field._replace(name=short + field.name.removeprefix(f"{table}.NAME"), kind=field.kind or kind)
    return field
