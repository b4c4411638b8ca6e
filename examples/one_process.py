"""Asynchronous PPO in one process and one file: sample at version v, train at version v + lag, swap.

    python examples/one_process.py --lag 0                          # held-out accuracy from 0.38 to 0.86
    python examples/one_process.py --lag 16 --correction off        # from 0.38 to 0.06
    python examples/one_process.py --lag 16 --correction topr       # from 0.38 to 0.93

A transformer of 84,000 parameters learns to add on a CPU: the reward is 1 for "19" after "7+12=", else 0. In a run of
streamppo, rollout processes, a queue and a learner work concurrently; here they take turns, so that the lag of the data
is exact. The mathematics is `streamppo.algorithms`, called as the learner calls it (streamppo/learner/update.py).

An update has three policies, none of which is called old:

    behavior   sampled the completion, `lag` versions ago
    proximal   the newest version, before the first step of the update
    current    is being trained, and differs from proximal after the first minibatch

    weight = proximal / behavior     corrects for the lag of the data          https://arxiv.org/abs/2110.00641
    ratio  = current / proximal      is kept near 1 by PPO's clip              https://arxiv.org/abs/1707.06347

B completions, P tokens of a prompt, T tokens of a completion (padded), L = P + T, V vocabulary, D width.
"""

import argparse
import copy
import random
from collections import deque
from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo.algorithms.advantages import gae, whiten
from streamppo.algorithms.aggregate import aggregate, denominators
from streamppo.algorithms.corrections import Correction, importance_weights, scale_negatives, topr
from streamppo.algorithms.diagnostics import off_policy
from streamppo.algorithms.masked import on_last_token
from streamppo.algorithms.policy_losses import clipped
from streamppo.algorithms.value_losses import value_loss

PADDING, END, SPECIALS = 0, 1, 2
ALPHABET = "0123456789+= "
PROMPT_TOKENS = len(" 7+12=")
MAX_TOKENS = len("119") + 1  # the end
FIRST, SECOND, HELD_OUT = range(20), range(100), 256
BATCH_SIZE, MINIBATCHES, TEMPERATURE = 128, 2, 1.0
LR, MAX_GRAD_NORM = 8e-4, 0.5
CLIP, CAP, CRITIC_COEFFICIENT, ENTROPY_COEFFICIENT = 0.2, 2.0, 0.5, 0.01
WARM_START_STEPS, UPDATES = 50, 300


# --- the task: prompts, tokens and the reward -------------------------------------------------------------------


def prompts(seed: int) -> tuple[list[str], list[str]]:
    """Return (training prompts, held-out prompts), such as " 7+12="; a+b and b+a are in the same set."""
    unordered = sorted({(min(a, b), max(a, b)) for a in FIRST for b in SECOND})
    held_out = set(random.Random(seed).sample(unordered, HELD_OUT))
    sides: tuple[list[str], list[str]] = ([], [])
    for a, b in product(FIRST, SECOND):
        sides[(min(a, b), max(a, b)) in held_out].append(f"{a:2}+{b:2}=")
    return sides


def answer(prompt: str) -> str:
    """Return the right answer: "19" for " 7+12="."""
    return str(sum(int(number) for number in prompt.rstrip("=").split("+")))


def encode(text: str) -> list[int]:
    """Return the token of each character."""
    return [SPECIALS + ALPHABET.index(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    """Return the text up to the end token; "" for a completion that was cut off."""
    ended = tokens[: tokens.index(END)] if END in tokens else []
    return "".join(ALPHABET[token - SPECIALS] if token >= SPECIALS else "?" for token in ended)


def rewards(some: Sequence[str], tokens_BT: Tensor) -> Tensor:
    """[B], 1 for the exact answer followed by the end token, else 0."""
    completions = [decode(tokens) for tokens in tokens_BT.tolist()]
    return torch.tensor([float(text == answer(prompt)) for prompt, text in zip(some, completions, strict=True)])


# --- the policy: a transformer with a value head ----------------------------------------------------------------


class Policy(nn.Module):
    """A causal language model, and a critic that reads its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        config = Qwen2Config(
            vocab_size=SPECIALS + len(ALPHABET), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=PROMPT_TOKENS + MAX_TOKENS,
            initializer_range=0.09, tie_word_embeddings=False, bos_token_id=None, eos_token_id=END,
        )  # fmt: skip
        self.lm = Qwen2ForCausalLM(config)
        for name, parameter in self.lm.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias")):
                # Heads attend to different positions from the first step on.
                nn.init.normal_(parameter, std=1.0)
        self.value_head = nn.Linear(config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, inputs_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T] each: log-probs of the completions' tokens, the critic's values before them, and entropies.

        The hidden state at position i predicts token i + 1.
        """
        hidden_BTD = self.lm.model(input_ids=inputs_BL[:, :-1]).last_hidden_state[:, PROMPT_TOKENS - 1 :]
        logp_BTV = (self.lm.lm_head(hidden_BTD) / TEMPERATURE).log_softmax(-1)
        logp_BT = logp_BTV.gather(-1, inputs_BL[:, PROMPT_TOKENS:, None]).squeeze(-1)
        return logp_BT, self.value_head(hidden_BTD).squeeze(-1), -(logp_BTV.exp() * logp_BTV).sum(-1)


def warm_start(policy: Policy, some: Sequence[str]) -> None:
    """Train on right answers for a few supervised steps: a policy that is never right has no reward to learn from."""
    rows = [[*encode(prompt + answer(prompt)), END, PADDING, PADDING] for prompt in some]
    inputs_NL = torch.tensor([row[: PROMPT_TOKENS + MAX_TOKENS] for row in rows])
    optimizer = torch.optim.AdamW(policy.lm.parameters(), lr=5e-3)
    for _ in range(WARM_START_STEPS):
        inputs_BL = inputs_NL[torch.randint(len(some), (2 * BATCH_SIZE,))]
        mask_BT = inputs_BL[:, PROMPT_TOKENS:] != PADDING
        logprobs_BT, _, _ = policy(inputs_BL)
        step(policy, optimizer, -logprobs_BT[mask_BT].mean(), max_norm=1.0)


def step(policy: Policy, optimizer: torch.optim.Optimizer, loss: Tensor, max_norm: float) -> None:
    """Take one optimizer step with a clipped gradient."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    optimizer.step()


# --- sample: the engine -----------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Completions with rewards, and the version of the policy that sampled them; the mask is True up to their ends."""

    version: int
    inputs_BL: Tensor
    mask_BT: Tensor
    behavior_logprobs_BT: Tensor
    reward_B: Tensor


@torch.no_grad()
def sample(engine: Policy, some: Sequence[str], temperature: float, version: int) -> Batch:
    """Sample completions token by token with a KV cache, with their log-probs; greedy at temperature 0."""
    # All prompts have the same length: numbers below 10 are padded with a space.
    prompts_BP = next_BL = torch.tensor([encode(prompt) for prompt in some])
    running_B, cache, columns = torch.ones(len(some), dtype=torch.bool), None, []
    for _ in range(MAX_TOKENS):  # the cache is given by place: versions of transformers name it differently
        logits_B1V, cache = engine.lm(next_BL, None, None, cache, use_cache=True, logits_to_keep=1)[:2]
        logp_BV = (logits_B1V[:, -1] / (temperature or 1.0)).log_softmax(-1)
        sampled_B1 = torch.multinomial(logp_BV.exp(), 1) if temperature else logp_BV.argmax(-1, keepdim=True)
        next_BL = sampled_B1.masked_fill(~running_B[:, None], PADDING)
        columns.append((next_BL[:, 0], logp_BV.gather(-1, next_BL)[:, 0], running_B))
        running_B = running_B & (next_BL[:, 0] != END)
    tokens_BT, logprobs_BT, mask_BT = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    inputs_BL = torch.cat([prompts_BP, tokens_BT], dim=1)
    return Batch(version, inputs_BL, mask_BT, logprobs_BT, rewards(some, tokens_BT))


def accuracy(engine: Policy, some: Sequence[str]) -> float:
    """Return the fraction of right greedy answers."""
    return sample(engine, some, temperature=0.0, version=0).reward_B.mean().item()


# --- train: one update ------------------------------------------------------------------------------------------


class Update(NamedTuple):
    """Metrics of one update: `lag` is the learner's version minus the batch's, `ratio_bT` the first minibatch's."""

    lag: int
    reward: float
    ess: float
    kl: float
    weights_BT: Tensor
    ratio_bT: Tensor


def correct(kind: str, proximal_BT: Tensor, behavior_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Correction:
    """Correct for the lag of the data with a weight for every token; `off` treats old data as fresh.

        truncate   weight = min(proximal / behavior, CAP)
        topr       weight = min(prod_t(proximal / behavior), 1) if A < 0 else 1      https://arxiv.org/abs/2503.14286
        off        weight = 1

    With proximal == behavior every weight is 1.
    """
    if kind == "topr":
        return topr(proximal_BT, behavior_BT, advantages_BT, mask_BT)
    mode = "off" if kind == "off" else "truncate"
    return importance_weights(proximal_BT, behavior_BT, mask_BT, level="token", mode=mode, cap=CAP)


def train(
    learner: Policy, optimizer: torch.optim.Optimizer, batch: Batch, version: int, correction: str, negative: float
) -> Update:
    """Make version + 1 of the policy from one batch, in `MINIBATCHES` optimizer steps."""
    mask_BT, behavior_BT = batch.mask_BT, batch.behavior_logprobs_BT

    # Log-probs before the first step are the proximal policy's.
    with torch.no_grad():
        proximal_BT, proximal_values_BT, _ = learner(batch.inputs_BL)

    # GAE with lam = 1: advantages = reward - values. The completion has ended, so nothing is bootstrapped.
    rewards_BT, bootstrap_B = on_last_token(batch.reward_B, mask_BT), torch.zeros_like(batch.reward_B)
    estimate = gae(rewards_BT, proximal_values_BT, mask_BT, bootstrap_B, gamma=1.0, lam=1.0)
    advantages_BT, returns_BT = whiten(estimate.advantages, mask_BT), estimate.returns

    # How far proximal is from behavior, before anything is truncated: ess = sum(w)^2 / (n * sum(w^2)), kl = k3.
    lag_BT = torch.full_like(mask_BT, version - batch.version, dtype=torch.long)
    apart = off_policy(proximal_BT, behavior_BT, mask_BT, lag_BT).overall
    weights_BT = correct(correction, proximal_BT, behavior_BT, advantages_BT, mask_BT).weights

    ratios: list[Tensor] = []
    for rows in torch.randperm(len(mask_BT)).chunk(MINIBATCHES):
        mask_bT, advantages_bT = mask_BT[rows], advantages_BT[rows]
        logprobs_bT, values_bT, entropy_bT = learner(batch.inputs_BL[rows])
        # max(-A * ratio, -A * clamp(ratio, 1 - CLIP, 1 + CLIP)) with ratio = current / proximal
        surrogate = clipped(logprobs_bT, proximal_BT[rows], advantages_bT, mask_bT, clip_low=CLIP, clip_high=CLIP)
        policy_bT = weights_BT[rows] * scale_negatives(surrogate.loss, advantages_bT, negative=negative)
        critic_bT = value_loss(values_bT, proximal_values_BT[rows], returns_BT[rows], mask_bT, clip=CLIP).loss
        loss_bT = policy_bT + CRITIC_COEFFICIENT * critic_bT - ENTROPY_COEFFICIENT * entropy_bT
        loss = aggregate(loss_bT, mask_bT, "token-mean", denominators(mask_bT), lengths_B=mask_bT.sum(-1))
        step(learner, optimizer, loss, MAX_GRAD_NORM)
        ratios.append(surrogate.ratio)
    reward = batch.reward_B.mean().item()
    return Update(version - batch.version, reward, apart.ess_token, apart.k3, weights_BT, ratios[0])


# --- the loop ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> list[Update]:
    """Train a policy, and print a line every ten updates."""
    options = parse(argv)
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    training, held_out = prompts(options.seed)
    learner = Policy()
    warm_start(learner, training)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    engine = copy.deepcopy(learner)
    print(f"update    0  held-out accuracy {accuracy(engine, held_out):.3f}, after {WARM_START_STEPS} supervised steps")

    ahead: deque[Batch] = deque()
    updates: list[Update] = []
    for version in range(options.updates):
        # Sample ahead at this version until the oldest of lag + 1 batches is `lag` versions old (fewer at first).
        while len(ahead) <= options.lag:
            ahead.append(sample(engine, random.choices(training, k=BATCH_SIZE), TEMPERATURE, version))
        # Train on the oldest batch, then swap the engine to version + 1.
        updates.append(train(learner, optimizer, ahead.popleft(), version, options.correction, options.negative_weight))
        engine.load_state_dict(learner.state_dict())
        if (version + 1) % 10 == 0 or version + 1 == options.updates:
            print(line(version + 1, updates[-10:], accuracy(engine, held_out)), flush=True)
    return updates


def line(update: int, latest: Sequence[Update], held_out: float) -> str:
    """Return one line for the latest updates: the lag of the last one, and means over all."""
    reward, ess, kl = (
        fmean(numbers) for numbers in zip(*((one.reward, one.ess, one.kl) for one in latest), strict=True)
    )
    return (
        f"update {update:4}  lag {latest[-1].lag:2}  reward {reward:.3f}  held-out accuracy {held_out:.3f}  "
        f"ess {ess:.3f}  kl {kl:.4f}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lag", type=int, default=0, help="versions between sampling and training (0, 4, 16)")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--correction", choices=("off", "truncate", "topr"), default="truncate")
    parser.add_argument("--negative-weight", type=float, default=1.0, help="of tokens with a negative advantage")
    options = parser.parse_args(argv)
    if options.lag < 0 or options.updates < 0:
        parser.error("--lag and --updates must be 0 or more")
    if not 0 <= options.negative_weight <= 1:
        parser.error("--negative-weight must lie between 0 and 1")
    return options


if __name__ == "__main__":
    main()
