"""Impossible values: NaN, names of no folder, broken addresses."""

import pytest
from conftest import MATH

from streamppo.config import file as configfile
from streamppo.errors import ConfigError

NUMBERS = """
learner.lr learner.weight_decay learner.max_grad_norm reward.weight reward.timeout_s reward.correct_at
algorithm.entropy algorithm.target_kl algorithm.kl.target algorithm.kl.loss_beta algorithm.advantage.gamma
algorithm.advantage.lam algorithm.correction.cap algorithm.critic.coefficient algorithm.critic.lr
rollout.temperature rollout.top_p rollout.gpus watchdog.stall_s watchdog.shutdown_s
model.tiny.target_accuracy task.held_out
"""


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("name", NUMBERS.split())
def test_infinity_and_nan_are_no_numbers(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: must be a number.*, not {value}"):
        configfile.load(MATH, ["algorithm.correction.kind=truncate", f"{name}={value}"])


@pytest.mark.parametrize("name", ["", "a/b", ".a", "a\0b", "a\nb", "a\x1b[31m", "x" * 300, " a", "a ", "é" * 101])
def test_a_name_that_no_folder_has_is_refused_in_a_line_that_can_be_read(name: str) -> None:
    with pytest.raises(ConfigError, match="must be usable as the name of a folder") as refused:
        configfile.change(configfile.load(MATH), [f"name={name}"] if name.strip() == name else [f"name='{name}'"])
    assert str(refused.value).isprintable() and len(str(refused.value)) < 300


def test_the_values_that_a_field_takes_are_listed() -> None:
    with pytest.raises(
        ConfigError, match=r'too_old: must be "drop", "keep", "mask", "wait" or "windowed", not "discard"'
    ):
        configfile.load(MATH, ["queue.too_old=discard"])


@pytest.mark.parametrize("kind", ["kind='service', url='here:80'", "kind='judge', url='h', model='m', question='q'"])
def test_an_address_says_how_it_is_reached(kind: str) -> None:
    with pytest.raises(ConfigError, match="must begin with http:// or https://"):
        configfile.load(MATH, [f"reward={{scorers={{a={{{kind}}}}}}}"])
