"""Plays a draw in this process: `check`, three updates with learner and engine, and an export.

All results are compared with transformers' (folder_oracle.py).
"""

import asyncio
import inspect
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import folder_faults
import folder_oracle as oracle
import folder_rows
import model_folders
import numpy as np
import tomli_w
import torch
from folder_draw import Draw, turn_end
from torch.distributed.device_mesh import init_device_mesh

from streamppo.algorithms.groups import zero_variance
from streamppo.commands.checks import check
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import ConfigError, StreamppoError
from streamppo.learner import learner as learners
from streamppo.learner.attention import layers
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import policy
from streamppo.rollout import build
from streamppo.rollout.engine import Completion, Cuts, Sampling
from streamppo.rollout.episode import Episode
from streamppo.rollout.player import FAILURES, Player
from streamppo.tasks import task as tasks
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Batch, Identity, Prompt, Trajectory, ints
from streamppo.weights.ledger import PublishReply

UPDATES, BATCH, SAMPLES = 3, 6, 2
MAX_TOKENS, ALL_TOKENS = 12, 96
SAID = "Are you sure?"
"""The environment's message after the first turn."""
CLOSE = {"float32": 3e-4, "bfloat16": 0.4}
"""The largest allowed difference of two log-probs of one token, by the dtype of the computation."""

REWARD = """\
import datetime
import decimal

PLAIN = (str, int, float, bool, bytes, type(None), datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)


def plain(value):
    if isinstance(value, dict):
        return all(plain(one) for one in value.values())
    if isinstance(value, (list, tuple)):
        return all(plain(one) for one in value)
    return type(value).__module__ in ("builtins", "datetime", "decimal") and isinstance(value, PLAIN)


def worth(text, columns):
    wrong = [name for name, value in columns.items() if not plain(value)]
    assert not wrong, wrong
    assert isinstance(text, str), text
    return (len(text) % 5) / 4


async def trajectory(trajectory, answer, **columns):
    return worth(trajectory.completion, {"answer": answer, **columns})


async def trl(prompts, completions, completion_ids, answer, **columns):
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [worth(text, {"answer": answer[0]}) for text in texts]


async def verl(data_source, solution_str, ground_truth, extra_info):
    return worth(solution_str, {"ground_truth": ground_truth, "extra_info": extra_info})
"""
TURNS = """\
from streamppo.tasks.environments import Done
from streamppo.types import Message


class Turns:
    def __init__(self, said: str, turns: int) -> None:
        self._said, self._left = said, turns

    async def reset(self, prompt):
        return list(prompt.messages) or prompt.text

    async def step(self, text):
        self._left -= 1
        return Done(0.25) if self._left == 0 else [Message(role="user", content=self._said)]
"""


@dataclass
class Outcome:
    """The outcome of a draw: "passes", "refused" with a message, or "failed" with a list of errors; its seconds."""

    number: int
    draw: str
    expected: str
    outcome: str = "passes"
    sentence: str = ""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    two_turns: int = 0

    @property
    def silent(self) -> bool:
        """True if the draw failed: it neither passed nor was refused with a remedy, as it must."""
        return bool(self.wrong)

    def row(self) -> dict[str, Any]:
        """The fields as values for JSON."""
        return asdict(self)


def write(made: Draw, folder: Path) -> tuple[Path, folder_rows.Rows]:
    """Write the model, the rows and the configuration of a draw."""
    model = model_folders.make(
        folder / "model",
        family=made.family,
        tokenizer=made.tokenizer,
        template=made.template,
        tied=made.tied,
        dtype=made.dtype,
        layout=made.layout,
        generation=made.generation,
        spare=made.spare,
        seed=made.number,
        stop_chance=0.3,
    )
    if made.fault:
        {**folder_faults.FAULTS, **folder_faults.ODDITIES}[made.fault](model)
    rows = folder_rows.write(folder, made.rows, made.words)
    task = {"kind": "data", **rows.task, "held_out": 0.2}
    if made.row_fault:
        task |= folder_rows.FAULTS[made.row_fault][0](folder)
        if "evaluation" in task:
            task.pop("held_out")
    (folder / "reward.py").write_text(REWARD)
    (folder / "turns.py").write_text(TURNS)
    tree: dict[str, Any] = {
        "name": f"draw-{made.number}",
        "updates": UPDATES,
        "model": {"path": str(model), "dtype": made.compute},
        "task": task,
        "reward": {"function": f"{folder / 'reward.py'}:{made.reward}", "where": "actor"},
        "rollout": {"max_tokens": MAX_TOKENS, "in_flight": 2 * BATCH, "slots": BATCH},
        "queue": {"batch_size": BATCH, "samples_per_prompt": SAMPLES, "max_lag": 1, "too_old": "mask"},
        "algorithm": {"advantage": {"kind": "grpo"}, "correction": {"kind": "truncate", "level": "token", "cap": 2.0}},
        "learner": {"lr": 1e-3},
        "evaluation": {"every": 0, "prompts": 1},
        "checkpoint": {"every": 0},
    }
    if made.engine != "embedded":
        tree["rollout"]["engine"] = {"kind": made.engine}
    if made.turns > 1:
        arguments = {"said": SAID + made.words, "turns": made.turns}
        name = f"{folder / 'turns.py'}:Turns"
        tree["environment"] = {"name": name, "arguments": arguments, "max_turns": 2, "max_tokens": ALL_TOKENS}
    path = folder / "draw.toml"
    path.write_text(tomli_w.dumps(tree))
    return path, rows


def play(made: Draw, folder: Path) -> Outcome:
    """Play a draw in `folder`. Requires a process group with only this process."""
    begin = time.perf_counter()
    found = Outcome(made.number, str(made), made.expected)
    path, rows = write(made, folder)
    try:
        if sentence := refusal(path):
            found.outcome, found.sentence = "refused", sentence
        else:
            config = configfile.load(path)
            asyncio.run(_Played(made, rows, config, folder, found).all())
    except StreamppoError as error:
        found.wrong.append(f"check found nothing, and then {type(error).__name__}: {_short(error)}")
    # A faulty folder may raise any exception.
    except (Exception, SystemExit) as error:
        found.wrong.append(f"raw {type(error).__name__}: {_short(error)} at {_place(error)}")
    judge(made, found)
    found.seconds = round(time.perf_counter() - begin, 2)
    return found


def judge(made: Draw, found: Outcome) -> None:
    """Compare the outcome with the expected one."""
    if found.wrong:
        found.outcome = "failed"
    elif found.outcome == "passes" and made.expected == "refused":
        found.wrong, found.outcome = [f"passes, and is to be refused for {made.remedy!r}"], "failed"
    elif found.outcome == "refused" and made.expected == "passes":
        found.wrong, found.outcome = [f"refused without need: {found.sentence}"], "failed"
    elif found.outcome == "refused" and not re.search(made.remedy, found.sentence, re.IGNORECASE):
        found.wrong, found.outcome = [f"refused in words without {made.remedy!r}: {found.sentence}"], "failed"


def refusal(path: Path) -> str:
    """The errors of `check`; empty if there are none."""
    try:
        config = configfile.load(path)
        found = check.check_all(config, None, call=True)
    except ConfigError as error:
        return str(error)
    return "\n".join(f"{one.subject}: {one.text}" for one in found if one.state == "error")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "?" if trace is None else f"{trace.tb_frame.f_code.co_filename.split('/')[-1]}:{trace.tb_lineno}"


class TransformersEngine:
    """Samples with transformers, one completion after another: replaces an engine that this machine lacks."""

    def __init__(self, lm: Any, eos_ids: set[int], words: int, seed: int) -> None:
        self._lm, self._stops, self._words = lm, eos_ids, words
        self._generator = torch.Generator().manual_seed(seed)
        named = inspect.signature(lm.forward).parameters
        self._cache = next((name for name in layers.CACHE_NAMES if name in named), layers.CACHE_NAMES[0])
        self.version = 0

    async def generate(self, prompt: Any, sampling: Sampling, cuts: Cuts | None = None) -> Completion:
        """See `Engine.generate`."""
        # As a decorator, no_grad would end before the coroutine runs.
        with torch.no_grad():
            return self._generate(prompt, sampling)

    def _generate(self, prompt: Any, sampling: Sampling) -> Completion:
        tokens, logprobs, kept, finish = list[int](), list[float](), None, "length"
        row = torch.tensor(np.asarray(prompt)[None].astype(np.int64))
        while len(tokens) < sampling.max_tokens:
            out = self._lm(row, **{self._cache: kept}, use_cache=True)
            kept = out[self._cache]
            logp_V = out.logits[0, -1, : self._words].float().log_softmax(-1)
            token = int(torch.multinomial(logp_V.exp(), 1, generator=self._generator))
            tokens.append(token)
            logprobs.append(float(logp_V[token]))
            row = torch.tensor([[token]])
            if token in self._stops:
                finish = "stop"
                break
        versions = np.full(len(tokens), self.version, np.int32)
        return Completion(np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32), versions, finish)

    async def update_weights(self, version: int, tensors: Any, contents: Any = None) -> None:
        """See `Engine.update_weights`."""
        held = dict(self._lm.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors.items():
                held[name].copy_(tensor)
        self.version = version

    async def stop(self) -> None:
        """See `Engine.stop`."""


class _Played:
    """Plays one draw, and compares all results on the way; differences are added to `found.wrong`."""

    def __init__(self, made: Draw, rows: folder_rows.Rows, config: Config, folder: Path, found: Outcome) -> None:
        self._made, self._rows, self._config, self._folder = made, rows, config, folder
        self._model = Path(config.model.path)
        self._first = oracle.load(self._model)
        self._tokenizer = Tokenizer(self._model, config.model.clock)
        self._stops = oracle.stops(self._model, self._first.tokenizer, made.template)
        self._close = CLOSE[made.compute]
        self._teaches = False
        self._found, self.wrong = found, found.wrong

    @property
    def _words(self) -> int:
        """The number of tokens of the loaded tokenizer; for Qwen it may be smaller than when it was saved."""
        return len(self._first.tokenizer)

    async def all(self) -> None:
        """Train, export and compare."""
        if self._made.fault != "different_head" and self._first.missing:
            self.wrong.append(f"transformers reports {self._first.missing[:2]}, and check does not")
        mesh = init_device_mesh("cpu", (1,))
        learner = learners.build(self._config, str(self._model), mesh, _publish, None)
        task = tasks.build(self._config.task, self._config.seed, self._tokenizer)
        rewards = Rewards(self._config.reward)
        await rewards.start(task.sources())
        engine = await self._engine(learner.policy)
        try:
            stop = build.stop(self._config, str(self._model), self._tokenizer)
            player = Player(engine, self._tokenizer, self._config.environment, stop)
            if set(stop.ids) != self._stops:
                self.wrong.append(f"stops: {sorted(stop.ids)}, not {sorted(self._stops)}")
            for version in range(UPDATES + 1):
                episodes = await self._episodes(player, task, rewards, version)
                played = [episode for _, episode, _ in episodes]
                self._found.two_turns += sum(len(one.turn_ends) > 1 for one in played)
                if version == 0:
                    self._compare("engine at version 0", self._first, played)
                    for prompt, episode, _ in episodes:
                        self._compare_tokens(prompt, episode)
                if len(episodes) < BATCH:
                    return
                if version == UPDATES:
                    break
                batch = Batch(version=version, min_version=version, trajectories=tuple(one for *_, one in episodes))
                padded = pad(batch)
                self._teaches |= not zero_variance(padded.reward_B, padded.prompt_B).all()
                updated = learner.updater.update(padded)
                metrics = learner.metrics(updated)
                learner.updater.adapt(updated, metrics)
                self._check_metrics(version, metrics)
                learner.version = version + 1
                await engine.update_weights(version + 1, policy.gather_weights(learner.policy, self._made.compute))
        finally:
            await engine.stop()
            await rewards.close()
        out = self._folder / "final"
        learner.export(out)
        self._compare_export(out, learner.policy, [(one, trajectory) for _, one, trajectory in episodes])

    async def _engine(self, trained: policy.Policy) -> Any:
        tensors = policy.gather_weights(trained, self._made.compute)
        if self._made.engine == "embedded":
            return await build.engine(self._config, "draw", str(self._model), 0, tensors)
        lm = oracle.load(self._model).lm.to(getattr(torch, self._made.compute))
        # The learner's weights, as in a push.
        engine = TransformersEngine(lm, self._stops, self._words, self._made.number)
        await engine.update_weights(0, tensors)
        return engine

    async def _episodes(
        self, player: Player, task: tasks.Task, rewards: Rewards, version: int
    ) -> list[tuple[Prompt, Episode, Trajectory]]:
        async def one(number: int, sample: int) -> tuple[Prompt, Episode, Trajectory] | None:
            prompt = task.prompt(number)
            try:
                episode = await player.play(prompt, build.sampling(self._config))
                scored = episode.reward(
                    await rewards.score(prompt, episode.text(prompt, player.tokenizer, player.stop))
                )
            except FAILURES as error:
                self.wrong.append(f"a trajectory failed: {type(error).__name__}: {_short(error)}")
                return None
            identity = Identity(task="data", prompt=number, sample=sample)
            self._compare_text(episode, player)
            return prompt, episode, episode.trajectory(identity, "draw", scored)

        first = version * BATCH // SAMPLES
        pairs = [(first + row, sample) for row in range(BATCH // SAMPLES) for sample in range(SAMPLES)]
        played = await asyncio.gather(*(one(number, sample) for number, sample in pairs))
        return [one for one in played if one is not None]

    def _check_metrics(self, version: int, metrics: dict[str, float]) -> None:
        wrong = {name: value for name, value in metrics.items() if not np.isfinite(value)}
        if {"loss", "grad_norm"} & wrong.keys():
            self.wrong.append(f"update {version}: {wrong}")

    def _compare(self, what: str, loaded: oracle.Loaded, episodes: Sequence[Episode]) -> None:
        """Compare the log-probs of sampled tokens with transformers'."""
        far = 0.0
        for one in episodes:
            theirs = oracle.logprobs(loaded, one.prompt_tokens.tolist(), one.tokens.tolist(), words=self._words)
            far = max(far, oracle.furthest(one.logprobs[one.mask], theirs[one.mask]))
            if int(one.tokens[one.mask].max()) >= self._words:
                self.wrong.append(f"{what}: a token beyond the tokenizer's was sampled")
        if not far <= self._close:
            self.wrong.append(f"{what}: log-probs are {far:.2g} from transformers'")

    def _compare_tokens(self, prompt: Prompt, episode: Episode) -> None:
        """Compare prompt, turns and observations with transformers' rendering of the template."""
        made, tokenizer = self._made, self._first.tokenizer
        given = self._given(prompt)
        expected = oracle.prompt_ids(tokenizer, given)
        if not made.words and episode.prompt_tokens.tolist() != expected:
            shown = tokenizer.decode(episode.prompt_tokens.tolist())
            self.wrong.append(f"prompt: {shown!r}, not {tokenizer.decode(expected)!r}"[:400])
        if made.words:
            self._compare_controls(given, episode.prompt_tokens.tolist())
        sampled = np.split(episode.tokens, [end + 1 for end in episode.turn_ends[:-1]])[0]
        inner = set(sampled[:-1].tolist()) & self._stops
        if inner or (episode.finish == "stop" and int(episode.tokens[-1]) not in self._stops):
            self.wrong.append(f"stops: {sorted(self._stops)} do not end {episode.tokens.tolist()}")
        if len(episode.turn_ends) > 1 and isinstance(given, list) and not made.words:
            said = [{"role": "user", "content": SAID}]
            theirs = oracle.observation_ids(tokenizer, given, said, turn_end(made), self._stops)
            ours = episode.tokens[~episode.mask].tolist()
            if ours != theirs:
                shown = tokenizer.decode(ours), tokenizer.decode(theirs)
                self.wrong.append(f"observation: {shown[0]!r}, not {shown[1]!r}"[:400])

    def _compare_text(self, episode: Episode, player: Player) -> None:
        """Compare the text of the policy's first turn with transformers'."""
        end, tokenizer = episode.turn_ends[0] + 1, self._first.tokenizer
        theirs = oracle.text_of(tokenizer, episode.tokens[:end].tolist(), self._stops)
        scored = episode.text(Prompt(text="", columns={}), player.tokenizer, player.stop)
        ours = episode.turns[0] if episode.turns else scored.completion
        if ours != theirs:
            self.wrong.append(f"text: {ours!r}, not {theirs!r}")

    def _given(self, prompt: Prompt) -> str | list[dict[str, Any]]:
        """The conversation of a prompt's row."""

        def end(one: str | list[dict[str, Any]]) -> str:
            users = [one] if isinstance(one, str) else [turn["content"] for turn in one if turn["role"] == "user"]
            return users[-1]

        words = [one.content for one in prompt.messages if one.role == "user"]
        own = words[-1] if words else prompt.text
        return next((one for one in self._rows.prompts if end(one) == own), own)

    def _compare_controls(self, given: str | list[dict[str, Any]], ids: list[int]) -> None:
        """Check that the row's text adds no control tokens: their number is as without `words`."""
        tokenizer, words = self._first.tokenizer, self._made.words
        if isinstance(given, str):
            bare: str | list[dict[str, Any]] = given.replace(words, "")
        else:
            bare = [{**turn, "content": turn["content"].replace(words, "")} for turn in given]
        special = oracle.specials(tokenizer)
        ours, theirs = (sum(one in special for one in row) for row in (ids, oracle.prompt_ids(tokenizer, bare)))
        if ours != theirs:
            self.wrong.append(f"control tokens in a row's text: {ours} in the prompt, {theirs} of the template")

    def _compare_export(self, out: Path, trained: policy.Policy, played: Sequence[tuple[Episode, Trajectory]]) -> None:
        loaded = oracle.load(out)
        if loaded.missing:
            self.wrong.append(f"export: transformers reports {loaded.missing[:3]}")
        self._compare("engine at the last version", loaded, [one for one, _ in played])
        rows = pad(Batch(version=UPDATES, min_version=0, trajectories=tuple(one for _, one in played)))
        with torch.no_grad():
            scored = trained(rows, "policy").logprobs_BT
        far = 0.0
        for row, (episode, trajectory) in enumerate(played):
            prompt, tokens = ints(trajectory.prompt_tokens).tolist(), ints(trajectory.tokens).tolist()
            theirs = oracle.logprobs(loaded, prompt, tokens, words=self._words)
            ours = scored[row, : len(tokens)].numpy()
            far = max(far, oracle.furthest(ours[episode.mask], theirs[episode.mask]))
        if not far <= self._close:
            self.wrong.append(f"export: log-probs of the learner are {far:.2g} from transformers'")
        before, after = self._first.lm.state_dict(), loaded.lm.state_dict()
        if before.keys() != after.keys():
            self.wrong.append(f"export: other tensors: {sorted(before.keys() ^ after.keys())[:3]}")
        elif self._teaches and all(torch.equal(before[name], after[name]) for name in before):
            self.wrong.append("export: the weights are those of the start")
        self._compare_files(out, loaded)

    def _compare_files(self, out: Path, loaded: oracle.Loaded) -> None:
        """Compare tokenizer, chat template, generation config and dtype of the export."""
        text = "What is 1+2?\n <tool_call> x"
        before, after = self._first.tokenizer, loaded.tokenizer
        if before(text)["input_ids"] != after(text)["input_ids"] or before.eos_token != after.eos_token:
            self.wrong.append("export: another tokenizer")
        if before.chat_template != after.chat_template:
            self.wrong.append("export: another chat template")
        kept = oracle.stops(out, after, self._made.template)
        if kept != self._stops:
            self.wrong.append(f"export: stops {sorted(kept)}, not {sorted(self._stops)}")
        dtype = json.loads((out / "config.json").read_text()).get("dtype")
        if dtype != self._made.compute:
            self.wrong.append(f"export: dtype {dtype}, not {self._made.compute}")


def _publish(push: bytes, refs: object, learned: bytes) -> PublishReply:
    raise AssertionError("nothing is pushed here")
