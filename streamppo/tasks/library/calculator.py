"""Addition with a calculator: the example of an environment with a tool.

prompt       12+34=
the policy   46          an answer ends the trajectory: reward 1 if it is right
             =           a call: the calculator works out the question, or the sum that stands before the =
then         46=         what it shows; the policy has another turn
"""

from collections.abc import Sequence

from streamppo.tasks.environments import Done, Observation
from streamppo.types import Prompt

CALLS_OF = 5
"""One demonstration in so many begins with a call."""


class Calculator:
    """See the module. The component `tool` says whether the calculator was used."""

    def __init__(self) -> None:
        self._calls = 0

    async def reset(self, prompt: Prompt) -> str:
        """The question."""
        self._question = prompt.text.removesuffix("=")
        self._answer = str(prompt.columns["answer"])
        return prompt.text

    async def step(self, text: str) -> Observation | Done:
        """What the calculator shows, or the end."""
        if text.endswith("="):
            self._calls += 1
            return Observation(f"{_sum(text[:-1] or self._question)}=")
        right = float(text == self._answer)
        return Done(right, {"tool": float(self._calls > 0), "right": right})


def _sum(expression: str) -> str:
    """The sum, or + for an expression that is none."""
    numbers = expression.split("+")
    return str(sum(map(int, numbers))) if all(number.isdigit() for number in numbers) else "+"


def demonstrations(problems: Sequence[Prompt]) -> Sequence[Prompt]:
    """For the warm start: answers, here and there a call instead, and what to do with what the calculator shows."""
    shown: list[Prompt] = []
    for number, problem in enumerate(problems):
        answer = problem.columns["answer"]
        first = "=" if number % CALLS_OF == 0 else answer
        shown.append(Prompt(text=problem.text, columns={"answer": first}))
        shown.append(Prompt(text=f"{problem.text}=<eos>{answer}=", columns={"answer": answer}))
    return shown
