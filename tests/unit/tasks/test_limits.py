"""The user's function that limits each completion: an answer other than a number of tokens fails one trajectory."""

import pytest

from streamppo.errors import TaskError
from streamppo.tasks import length_limit
from streamppo.types import Identity, Prompt

PROMPT = Prompt(text="1+1=", columns={})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("half", r"own_limit:half': TypeError: 'float' object cannot be interpreted as an integer$"),
        ("none_at_all", r"gave 0, and a completion has at least 1 token$"),
    ],
)
def test_an_answer_that_is_no_number_of_tokens_is_refused(name: str, told: str) -> None:
    limit = length_limit.load(f"own_limit:{name}", 8)
    with pytest.raises(TaskError, match=told):
        limit(PROMPT, None)


def test_without_a_function_every_completion_has_the_limit_of_all() -> None:
    assert length_limit.load("", 8)(PROMPT, Identity(task="t", prompt=1, sample=0)) == 8
