"""V-trace against its definition, against rlax's published numbers, and against GAE where rho is 1."""

import math

import pytest
import torch
from padded_rows import Padded, assert_rows, compact, logprob_rows, near, ragged_mask, random_rows

from streamppo.algorithms.advantages import gae
from streamppo.algorithms.vtrace import TraceClip, log_rho, vtrace

Row = list[float]
OLD = torch.tensor(1)
"""The lag of tokens that another version sampled."""


def slow_vtrace(
    rewards: Row, values: Row, bootstrap: float, rho: Row, clip: TraceClip, *, gamma: float, lam: float
) -> tuple[Row, Row]:
    """(advantages, returns) of one compacted sequence, from the double sum."""
    T = len(values)
    following = [*values, bootstrap][1:]
    delta = [min(clip.rho_bar, rho[t]) * (rewards[t] + gamma * following[t] - values[t]) for t in range(T)]
    returns: list[float] = []
    for s in range(T):
        total = 0.0
        for t in range(s, T):
            if clip.kind == "step":
                trace = math.prod(min(clip.c_bar, rho[i]) for i in range(s, t))
            else:
                trace = min(clip.c_bar, math.prod(rho[i] for i in range(s, t)))
            total += (gamma * lam) ** (t - s) * trace * delta[t]
        returns.append(values[s] + total)
    next_returns = [*returns, bootstrap][1:]
    advantages = [rewards[t] + gamma * (lam * next_returns[t] + (1 - lam) * following[t]) - values[t] for t in range(T)]
    return advantages, returns


@pytest.mark.parametrize("lam", [1.0, 0.9, 0.0])
@pytest.mark.parametrize(
    "clip",
    [
        TraceClip(),
        TraceClip(1.2, 1.1, "step"),
        TraceClip(kind="cumulative"),
        TraceClip(1.3, 1.2, "cumulative"),
    ],
    ids=str,
)
def test_vtrace_equals_its_double_sum_on_the_compacted_sequence(lam: float, clip: TraceClip) -> None:
    mask = ragged_mask(2)
    rewards, values, behavior = random_rows(mask, 1), random_rows(mask, 2), logprob_rows(mask, 3)
    proximal = near(behavior, 4)
    bootstrap = [0.3 * b for b in range(len(mask))]
    padded = Padded(mask)
    log_rhos = log_rho(padded.tensor(proximal), padded.tensor(behavior), padded.mask, lag_BT=OLD.expand_as(padded.mask))
    got = vtrace(
        padded.tensor(rewards),
        padded.tensor(values),
        padded.mask,
        torch.tensor(bootstrap, dtype=torch.float64),
        log_rhos,
        gamma=0.95,
        lam=lam,
        clip=clip,
    )
    pairs = zip(compact(proximal, mask), compact(behavior, mask), strict=True)
    rho = [[math.exp(p - b) for p, b in zip(*pb, strict=True)] for pb in pairs]
    slow = [
        slow_vtrace(r, v, b, w, clip, gamma=0.95, lam=lam)
        for r, v, b, w in zip(compact(rewards, mask), compact(values, mask), bootstrap, rho, strict=True)
    ]
    assert_rows(padded.unmasked(got.advantages), [advantages for advantages, _ in slow])
    assert_rows(padded.unmasked(got.returns), [returns for _, returns in slow])
    assert got.advantages[~padded.mask].abs().sum() == 0


def test_vtrace_gives_the_published_numbers_of_rlax() -> None:
    """The inputs and expected arrays of google-deepmind/rlax, rlax/_src/vtrace_test.py; rlax weights advantages too."""
    behavior = torch.tensor(
        [
            [[8.9, 0.7], [5.0, 1.0], [0.6, 0.1], [-0.9, -0.1]],
            [[0.3, -5.0], [1.0, -8.0], [0.3, 1.7], [4.7, 3.3]],
        ]
    ).log_softmax(-1)
    target = torch.tensor(
        [
            [[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]],
            [[1.0, 0.9], [1.0, -1.0], [-4.3, 8.7], [0.8, 0.3]],
        ]
    ).log_softmax(-1)
    actions = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1]])[..., None]
    rewards = torch.tensor([[-1.3, -1.3, 2.3, 42.0], [1.3, 5.3, -3.3, -5.0]])
    discounts = torch.tensor([[0.0, 0.89, 0.85, 0.99], [0.88, 1.0, 0.83, 0.95]])
    values = torch.tensor([[2.1, 1.1, -3.1, 0.0], [3.1, 0.1, -1.1, 7.4]])
    mask = torch.ones(2, 4, dtype=torch.bool)
    log_rhos = log_rho(
        target.gather(-1, actions)[..., 0], behavior.gather(-1, actions)[..., 0], mask, lag_BT=OLD.expand_as(mask)
    )
    got = vtrace(
        rewards, values, mask, torch.tensor([8.4, -1.2]), log_rhos,
        gamma=discounts, lam=1.0,
    )  # fmt: skip
    weighted = got.advantages * log_rhos.exp().clamp(max=1.0)
    errors = [[-1.6155143, -3.4973226, 1.8670533, 50.316002], [1.4662437, 3.6116405, -8.3327293e-5, -13.54]]
    advantages = [
        [-1.6155143, -3.4973226, 1.8670534, 50.316002],
        [1.4662433, 3.6116405, -8.3369283e-05, -13.54],
    ]
    for b in range(2):
        assert (got.returns - values)[b].tolist() == pytest.approx(errors[b], rel=1e-3, abs=1e-6)
        assert weighted[b].tolist() == pytest.approx(advantages[b], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("kind", ["step", "cumulative"])
def test_vtrace_with_all_rho_one_is_gae(kind: str) -> None:
    mask = ragged_mask(4)
    padded = Padded(mask)
    rewards, values = padded.tensor(random_rows(mask, 1)), padded.tensor(random_rows(mask, 2))
    same = padded.tensor(logprob_rows(mask, 3))
    bootstrap = torch.linspace(0, 1, len(mask)).double()
    clip = TraceClip(kind="step" if kind == "step" else "cumulative")
    rhos = log_rho(same, same, padded.mask, lag_BT=OLD.expand_as(padded.mask))
    got = vtrace(rewards, values, padded.mask, bootstrap, rhos, gamma=0.98, lam=0.9, clip=clip)
    expected = gae(rewards, values, padded.mask, bootstrap, gamma=0.98, lam=0.9)
    torch.testing.assert_close(got.advantages, expected.advantages)
    torch.testing.assert_close(got.returns, expected.returns)


def test_tokens_of_the_learners_own_version_have_rho_exactly_one() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    proximal, behavior = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.1, -1.2, -1.3]])
    got = log_rho(proximal, behavior, mask, lag_BT=torch.tensor([[0, 1, 0]]))
    assert got.tolist() == [[0.0, pytest.approx(0.2), 0.0]]


def test_credit_decays_under_stepwise_clipping_and_survives_cumulative_clipping() -> None:
    """The claim in the docstring: with log-ratio noise of 0.05 the half-life of stepwise clipping is about 35."""
    T = 700
    noise = 0.05 * torch.randn(64, T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(64, T, dtype=torch.bool)
    rewards = torch.zeros(64, T, dtype=torch.float64)
    rewards[:, -1] = 1.0
    zeros = torch.zeros(64, dtype=torch.float64)

    def credit(kind: TraceClip) -> float:
        got = vtrace(rewards, torch.zeros_like(rewards), mask, zeros, noise, gamma=1.0, clip=kind)
        return float(got.returns[:, 0].mean())

    half_lives = T / 35
    assert credit(TraceClip()) == pytest.approx(2.0**-half_lives, rel=0.9)
    assert credit(TraceClip(kind="cumulative")) > 0.3
