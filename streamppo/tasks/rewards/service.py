"""Remote scorers: a plain JSON service, or a language model as a judge."""

import json
import re
from collections.abc import Mapping
from typing import cast

from streamppo.config.reward import JudgeScorer, ServiceScorer
from streamppo.errors import TaskError
from streamppo.tasks.dataset_files import Row
from streamppo.tasks.rewards.client import Client
from streamppo.tasks.rewards.outcome import QUOTED, Outcome, check, check_scored, failure_of
from streamppo.tasks.rewards.signature import Columns, Texts
from streamppo.tasks.rewards.styles import OPENRLHF
from streamppo.types import Reward, ScoredText


class Service:
    """Calls one address. Transport errors and busy servers are retryable failures."""

    def __init__(self, config: ServiceScorer | JudgeScorer) -> None:
        self._config = config
        self._client = Client(config.key_env, config.concurrency)

    async def call(self, texts: Texts, columns: Columns) -> tuple[Outcome, ...]:
        """Score the single trajectory in `texts`."""
        try:
            match self._config:
                case ServiceScorer(url=url, form="openrlhf"):
                    lists = OPENRLHF.arguments(OPENRLHF.parameters, texts, columns)
                    lists["query"] = lists.pop("queries")
                    return (check_scored(_only(await self._post(url, lists)), texts[0]),)
                case ServiceScorer(url=url):
                    names = ("prompt", "messages", "completion_messages", "completion", "finish", "source")
                    question = {name: getattr(texts[0], name) for name in names}
                    return (check_scored(await self._post(url, {**question, "columns": columns[0]}), texts[0]),)
                case JudgeScorer() as judge:
                    return (await self._judge(judge, texts[0], columns[0]),)
        # A foreign server's answer may have any form, so reading it may raise any exception.
        except Exception as error:
            return (failure_of(error),)

    async def close(self) -> None:
        await self._client.close()

    async def _judge(self, judge: JudgeScorer, text: ScoredText, columns: Row) -> Outcome:
        values = {**columns, "prompt": text.prompt, "completion": text.completion}
        # Only known names in braces are replaced: a completion may contain other braces.
        question = re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]) if m[1] in values else m[0], judge.question)
        answer = await self._post(
            f"{judge.url.rstrip('/')}/chat/completions",
            {
                "model": judge.model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": judge.max_tokens,
                "temperature": 0,
            },
        )
        match answer:
            case {"choices": [{"message": {"content": content}}, *_]}:
                judgement = str(content)
            case _:
                raise TaskError(f"{judge.url}: no chat completion: {repr(answer)[:QUOTED]}")
        match = re.search(judge.pattern, judgement.strip())
        if match is None:
            return Outcome(reason=f"the judge gave no number: {judgement[-QUOTED:]!r}")
        return check(Reward(score=float(match[1]) / judge.scale, explanation=judgement), text)

    async def _post(self, url: str, body: Mapping[str, object]) -> object:
        answer = await self._client.post(url, body)
        try:
            return json.loads(answer)
        except ValueError as error:
            raise TaskError(f"{url}: the answer is no JSON: {answer[:QUOTED]!r}") from error


def _only(answer: object) -> object:
    """Replace each list of one element by the element: a server of OpenRLHF answers with lists of all queries."""
    if isinstance(answer, Mapping):
        return {name: _only(value) for name, value in cast("Mapping[str, object]", answer).items()}
    return _only(answer[0]) if isinstance(answer, list) and len(answer) == 1 else answer
