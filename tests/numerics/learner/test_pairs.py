"""Every pair of choices of the mathematics makes two updates of finite numbers, or docs/algorithms.md names it.

The choices of `Algorithm` are read from its types, so that a new kind is paired with all others. A pair is completed to
a configuration that is taken; every such configuration shows all pairs of its choices.
"""

import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, product

import learner_case as case
import pytest
import two_updates
from conftest import REPOSITORY

from streamppo.config.sections import Config
from streamppo.errors import ConfigError

sys.path.insert(0, str(REPOSITORY))

from benchmarks.lib import draw

pytestmark = pytest.mark.usefixtures("alone")

Choices = Mapping[str, str]
"""The chosen word of each field."""


def word_of(override: str) -> str:
    """The kind or the word that an override chooses; of a list of kinds all of them, or "none"."""
    value = override.partition("=")[2]
    kinds = re.findall(r"kind='(\w+)'", value)
    if value.startswith("["):
        return "_and_".join(kinds) or "none"
    return kinds[0] if kinds else value


def fields() -> dict[str, dict[str, list[str]]]:
    """The overrides for each possible word of each field."""
    kinds = {
        field: {word_of(override): [override] for override in overrides} for field, overrides in draw.choices().items()
    }
    loss, reward = "algorithm.kl.loss_beta=0.1", "algorithm.kl.reward_beta=0.1"
    return {
        **kinds,
        "kl": {
            "none": [],
            "loss": [loss],
            "reward": [reward],
            "steered": [reward, "algorithm.kl.target=0.01"],
            "following": [loss, "algorithm.kl.follow_every=1"],
            "both": [loss, reward, "algorithm.kl.allow_both=true"],
        },
        "whiten": {over: [f"algorithm.whiten.over={over}"] for over in ("auto", "off", "batch", "group")},
        "critic": {"head": [], "own": ["algorithm.critic.model=policy"]},
        "steps": {"one": [], "several": ["learner.epochs=2", "learner.minibatches=2"]},
        "target_kl": {"off": [], "on": ["algorithm.target_kl=0.05"]},
        "max_lag": {"0": ["queue.max_lag=0"], "2": ["queue.max_lag=2"]},
    }


FIELDS = fields()
PLAIN = {
    "zero_variance": "keep",
    "filters": "none",
    "exploration": "off",
    "aggregation": "token-mean",
    "policy_loss": "clip",
    "kl": "none",
    "whiten": "auto",
    "target_kl": "off",
    "max_lag": "0",
}
"""Combines with nearly everything. Choices of the other fields are tried until one combines with a pair."""
OTHERS: Mapping[str, tuple[str, ...]] = {
    "correction": ("off", "truncate"),
    "advantage": ("rloo", "gae"),
    "critic": ("head", "own"),
    "steps": ("one", "several"),
    "proximal": ("recompute", "behavior"),
}


def config_of(choices: Choices) -> Config:
    overrides = [override for field, word in choices.items() for override in FIELDS[field][word]]
    return case.config_of("queue.batch_size=8", *overrides)


def completed(pair: Choices, generator: random.Random) -> Choices | None:
    """A configuration with `pair` and random choices of all other fields that are taken with it; None if none is."""
    for words in product(*OTHERS.values()):
        choices = {**PLAIN, **dict(zip(OTHERS, words, strict=True)), **pair}
        if is_taken(choices):
            break
    else:
        return None
    for field in generator.sample(sorted(FIELDS.keys() - pair.keys()), len(FIELDS) - len(pair)):
        changed = {**choices, field: generator.choice(sorted(FIELDS[field]))}
        choices = changed if is_taken(changed) else choices
    return choices


def is_taken(choices: Choices) -> bool:
    try:
        config_of(choices)
    except ConfigError as error:
        assert re.search(r": .{30,}", str(error)), "no sentence"
        return False
    return True


def pairs(choices: Iterable[tuple[str, str]]) -> Iterator[frozenset[tuple[str, str]]]:
    return (frozenset(pair) for pair in combinations(choices, 2))


def documented() -> set[frozenset[tuple[str, str]]]:
    """The pairs that a table of docs/algorithms.md refuses: `field`: words, words that it does not go with."""
    text = (REPOSITORY / "docs" / "algorithms.md").read_text()
    rows = re.findall(r"^\| `(\w+)`: ([\w, -]+) \| `(\w+)`: ([\w, -]+) \|$", text, flags=re.MULTILINE)
    return {
        frozenset({(field, word), (other, without)})
        for field, words, other, withouts in rows
        for word, without in product(words.split(", "), withouts.split(", "))
    }


@pytest.mark.slow
def test_every_pair_of_choices_trains_or_is_refused_as_the_documentation_says() -> None:
    generator = random.Random(0)
    every = [(field, word) for field, words in FIELDS.items() for word in words]
    left = {pair for pair in pairs(every) if len(dict(pair)) == 2}
    refused = set()
    for pair in sorted(left, key=sorted):
        if pair not in left:
            continue
        choices = completed(dict(pair), generator)
        if choices is None:
            refused.add(pair)
            continue
        try:
            two_updates.make(config_of(choices))
        except Exception as error:
            raise AssertionError(f"with {choices}") from error
        left -= set(pairs(choices.items()))
    assert sorted(map(sorted, refused)) == sorted(map(sorted, documented()))
