"""Rewards as the documentation and examples of other trainers have them. Each scores 1 for the answer 3, else 0."""
# pyright: basic

import functools


def graded(completion, answer):
    from math_verify import parse, verify

    return float(verify(parse(f"${answer}$"), parse(completion)))


def said(completion):
    """The text of the last message, as rewards for chats read it."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


# TRL, docs/source/grpo_trainer.md


def trl(completions, answer, **kwargs):
    return [graded(said(completion), one) for completion, one in zip(completions, answer, strict=True)]


async def trl_async(prompts, completions, answer, **kwargs):
    assert len(prompts) == len(completions)
    return trl(completions, answer)


class TrlFactory:
    __name__ = "made"

    def __call__(self, completions, answer, completion_ids, **kwargs):
        assert all(completion_ids)
        return trl(completions, answer)


made = TrlFactory()
closure = functools.partial(trl)


# verl, docs/preparation/reward_function.rst, and its batch reward manager


def verl(data_source, solution_str, ground_truth, extra_info=None):
    score = graded(solution_str, ground_truth)
    return {"score": score, "acc": score == 1, "pred": solution_str}


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert all(info["index"] == 7 and info["num_turns"] == 2 for info in extra_infos)
    assert not kwargs and len(data_sources) == len(solution_strs)
    return [{"score": graded(*pair)} for pair in zip(solution_strs, ground_truths, strict=True)]


# OpenRLHF, examples/python/math_reward_func.py


def openrlhf(queries, prompts, labels, **kwargs) -> dict:
    import torch

    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        assert prompt in query and not kwargs
        rewards.append(graded(query[len(prompt) :], label))
    rewards_tensor = torch.tensor(rewards, dtype=torch.float)
    return {
        "rewards": rewards_tensor,
        "scores": rewards_tensor,
        "extra_logs": {"math_accuracy": rewards_tensor.mean()},
    }


def openrlhf_tensor(queries, prompts, labels):
    return openrlhf(queries, prompts, labels)["rewards"]


# AReaL, areal/reward/gsm8k.py and examples/math/boba_grpo.py


def areal(prompt, completions, prompt_ids, completion_ids, answer, **kwargs) -> float:
    assert isinstance(prompt, str) and isinstance(completion_ids, list)
    return graded(str(completions), str(answer))


def areal_solutions(prompts, completions, prompt_ids, completion_ids, solutions, **kwargs) -> float:
    return max(graded(str(completions), solution) for solution in solutions)


# verifiers, docs/environments.md


async def verifiers(completion, answer, info) -> float:
    return graded(said(completion), answer) * info["weight"]


def verifiers_kwargs(prompt, completion, answer, **kwargs) -> float:
    assert kwargs["data_source"] == "sums"
    return graded(said(completion), answer)


# wrong ones


def of_slime(args, sample, **kwargs):
    return sample.response == sample.label


def with_state(completion, state):
    return state["score"]


def with_ids(prompt, completions, prompt_ids, completion_ids, **kwargs):
    return len(prompt_ids)


def hidden(function):
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


badly_wrapped = hidden(trl)
well_wrapped = functools.wraps(trl)(hidden(trl))


class Uncallable:
    """Its instances cannot be called."""


def by_keyword(*, trajectory, answer):
    return 1.0


def by_position(trajectory, answer, /):
    return 1.0


def trl_by_position(prompts, completions, /, **kwargs):
    return [1.0] * len(completions)
