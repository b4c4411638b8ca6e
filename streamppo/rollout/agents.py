"""Plays prompts with agents: programs that use the policy through an endpoint, without code of streamppo.

    prompt -> session -> agent in a process, with requests to the endpoint -> its end -> received turns, and rewards

consumes     prompts
produces     runs; a failed run raises an error with the reason, and its prompt is sampled again
waits for    a place among `MOST_RUNS`, a process, and the agent, whose requests wait for the engine
unblocks     nothing: requests in flight at an agent's end are cancelled
"""

import asyncio
import contextlib
import logging

import msgspec
import numpy as np
from msgspec import structs

from streamppo.config.reward import FunctionScorer
from streamppo.config.task import AgentEnvironment
from streamppo.errors import EnvironmentFailed
from streamppo.rollout.endpoint.server import Endpoint
from streamppo.rollout.endpoint.session import SampledPolicy, Session
from streamppo.rollout.engine import Sampling
from streamppo.rollout.episode import Episode
from streamppo.tasks import agent
from streamppo.tasks.environments import Done
from streamppo.tasks.rewards.outcome import Outcome
from streamppo.tasks.rewards.processes import template
from streamppo.tasks.rewards.processes.forks import Forks
from streamppo.tasks.rewards.processes.pool import Pool
from streamppo.tasks.rewards.processes.process import CallLost, Process
from streamppo.tasks.rewards.signature import Columns, Texts
from streamppo.types import Prompt, ScoredText, Template

MOST_RUNS = 1024
"""Maximum number of agents that run concurrently, also in an evaluation, which starts all its prompts at once."""
GRACE_S = 5.0
"""A process that still runs this long after the time limit is killed."""
HIDDEN = "[key]"
"""Replaces the run's key in texts from its agent."""
OVER_BUDGET = (
    "; an agent whose run is over its budget ends with a reward if it catches the error context_length_exceeded"
)
MEMORY_MIB = 8192
"""Memory that one process may allocate after it has imported the agent (Linux)."""

log = logging.getLogger(__name__)


class Agents:
    """Plays each prompt with a new run of the agent. If not `scored`, the agent must give a reward."""

    def __init__(self, policy: SampledPolicy, config: AgentEnvironment, *, scored: bool) -> None:
        self._policy, self._config, self._scored = policy, config, scored
        self._endpoint = Endpoint(config.host)
        self.counts = self._endpoint.counts
        self._pool: Pool | None = None
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(MOST_RUNS)
        self._has_noted_imports = False

    async def start(self) -> None:
        """Load the agent, and start the endpoint. Raises `TaskError` or `RunError`. A second call changes nothing."""
        async with self._starting:
            if self._pool is not None:
                return
            config = self._config
            agent.check(config)
            words, sandbox = (msgspec.json.encode(part).decode() for part in (config.command, config.sandbox))
            runs = FunctionScorer(
                function="streamppo.tasks.agent:Agent",
                arguments={"agent": config.agent, "command": words, "sandbox": sandbox},
                timeout_s=config.timeout_s + GRACE_S,
                memory_mib=MEMORY_MIB,
            )
            await self._endpoint.start()
            async with contextlib.AsyncExitStack() as on_failure:
                on_failure.push_async_callback(self._endpoint.stop)
                self._pool = _OnDemand(runs, Forks(runs, await template.start(runs)))
                on_failure.pop_all()

    async def close(self) -> None:
        if self._pool is not None:
            await self._endpoint.stop()
            await self._pool.close()

    async def play(self, prompt: Prompt, sampling: Sampling) -> Episode:
        """Play one prompt. Raises `EnvironmentFailed` with the reason."""
        await self.start()
        async with self._places:
            session = self._endpoint.open(lambda key: self._session(key, prompt, sampling))
            try:
                outcome = await self._run(session, prompt)
            finally:
                self._endpoint.close(session)
        try:
            return self._episode(session, outcome, prompt)
        except EnvironmentFailed as error:
            self.counts["failed"] += 1
            raise EnvironmentFailed(f"{error}{outcome.output}", error.tokens) from error

    def _session(self, key: str, prompt: Prompt, sampling: Sampling) -> Session:
        arguments = {**prompt.template.arguments, **self._config.template}
        settings = Template(arguments=arguments, control_tokens=self._config.control_tokens)
        return Session(key, self._policy, sampling, self._config, settings, counts=self.counts)

    async def _run(self, session: Session, prompt: Prompt) -> agent.AgentOutcome:
        assert self._pool is not None
        call = agent.AgentCall(address=self._endpoint.address, key=session.key, timeout_s=self._config.timeout_s)
        text = ScoredText(
            prompt=prompt.text,
            completion="",
            finish="stop",
            num_tokens=0,
            messages=prompt.messages,
            source=prompt.source,
        )
        columns = {**prompt.columns, agent.CALL: msgspec.json.encode(call).decode()}
        (answer,) = await self._pool.call((text,), (columns,))
        if answer.reward is None:
            if answer.late_at is None:
                reason = f"the agent: {answer.reason}"
            else:
                # The pool's time limit is longer than the agent's.
                reason = agent.timeout_reason(self._config.timeout_s, answer.late_at)
            outcome = agent.AgentOutcome(reason=reason)
        else:
            outcome = _read_outcome(answer)
        if outcome.imported and not self._has_noted_imports:
            self._has_noted_imports = True
            log.info(
                f"note: the agent's function imports {', '.join(outcome.imported)}. Each of its processes repeats "
                "this; import at the top of the file, and it happens once"
            )
        # An agent's output may quote the key of its run, and is stored in journal, log and live page.
        texts = {"reason": outcome.reason, "explanation": outcome.explanation, "output": outcome.output}
        return structs.replace(outcome, **{name: text.replace(session.key, HIDDEN) for name, text in texts.items()})

    def _episode(self, session: Session, outcome: agent.AgentOutcome, prompt: Prompt) -> Episode:
        if outcome.reason:
            raise EnvironmentFailed(outcome.reason + OVER_BUDGET * session.refused, session.sampled)
        turns = session.received_turns()
        has_reward = outcome.score is not None or session.rewards or any(turn.reward for turn in turns)
        if not has_reward and not self._scored:
            reason = "the agent gave no reward: return a number, POST one to /v1/reward, or name a scorer in [reward]"
            raise EnvironmentFailed(reason, session.sampled)
        if outcome.turns and len(outcome.turns) != len(turns):
            reason = f"the agent returned rewards for {len(outcome.turns)} turns, and {len(turns)} were received"
            raise EnvironmentFailed(reason, session.sampled)
        rewards = np.array([turn.reward for turn in turns]) + np.array(outcome.turns or (0.0,))
        rewards[-1] += (outcome.score or 0.0) + sum(session.rewards)
        first = session.turns[0].request
        opening = Prompt(
            text=prompt.text,
            columns={},
            messages=first.messages if self._policy.tokenizer.has_template else (),
            template=Template(tools=first.tools),
        )
        self.counts["runs"] += 1
        # A failed run is not counted here: its `EnvironmentFailed` has the number of all its sampled tokens.
        self.counts["undelivered tokens"] += session.undelivered
        columns, row = session.row.columns([turn.number for turn in turns]), slice(session.row.prompt, None)
        # The sampled tokens of the turns follow each other in the row, in the order of `turns`.
        ends = np.flatnonzero(columns.mask[row])[np.cumsum([turn.tokens for turn in turns]) - 1]
        return Episode(
            columns.tokens[: session.row.prompt],
            columns.tokens[row],
            columns.logprobs[row],
            columns.versions[row],
            columns.mask[row],
            "length" if session.refused or turns[-1].finish == "length" else "stop",
            tuple(ends.tolist()),
            tuple(turn.text for turn in turns),
            tuple(rewards.tolist()),
            Done(0.0, outcome.components, outcome.explanation),
            columns.candidates,
            columns.routes_SE,
            opening,
            tuple(turn.new for turn in turns[1:]),
            columns.branches.tobytes(),
            session.row.turn_column({turn.number for turn in turns}),
        )


class _OnDemand(Pool):
    """A pool whose processes each serve one run at a time. If no process is free, a new one is forked."""

    def __init__(self, config: FunctionScorer, forks: Forks) -> None:
        super().__init__(config, forks)
        self._free: list[Process] = []

    async def fill(self) -> None:
        """Do nothing: processes are forked on demand."""

    async def run(self, texts: Texts, columns: Columns, remaining_s: float) -> tuple[Outcome, ...]:
        """Run a call in a free process. Raises `Orphaned`."""
        self._free = [free for free in self._free if not free.ended]
        process = self._free.pop() if self._free else await self._forks.fork()
        has_answered, outcomes = False, tuple[Outcome, ...]()
        try:
            outcomes = await self._ask(process, texts, columns, remaining_s)
            has_answered = True
        except CallLost:
            return (Outcome(reason="its process was killed"),)
        finally:
            if not has_answered:
                # After a cancellation the process is still busy with the call.
                self._forks.end(process)
            elif any(outcome.reward is not None and _read_outcome(outcome).lingers for outcome in outcomes):
                # A thread or task that the agent has left behind could read the next run's key from the environment.
                self._forks.end(process)
            elif not process.ended:
                self._free.append(process)
        return outcomes


def _read_outcome(outcome: Outcome) -> agent.AgentOutcome:
    assert outcome.reward is not None
    return msgspec.json.decode(outcome.reward.explanation, type=agent.AgentOutcome)
