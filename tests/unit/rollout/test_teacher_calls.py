"""A teacher's server: its log-probs, its failures, and its tokenizer."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import Scripted
from teacher_server import Edit, Server, teaching
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from streamppo.config.task import Environment
from streamppo.config.teacher import Teacher as Config
from streamppo.errors import ModelError, TaskError, TeacherFailed
from streamppo.rollout import teacher
from streamppo.rollout.engine import Sampling
from streamppo.rollout.episode import Episode
from streamppo.rollout.player import Player
from streamppo.tasks.environments import Done, Observation
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.types import Identity, Prompt, Reward, ScorerReport, Trajectory, branches, flags, floats, ints

VOCABULARY = 9
ALPHABET = "0123+="
EOS = "<eos>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    made = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen2Config(vocab_size=VOCABULARY, initializer_range=0.5, **shape, **heads, **ids)
    Qwen2ForCausalLM(config).save_pretrained(made)
    character_tokenizer(ALPHABET).save_pretrained(made)
    return made


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with teaching(folder) as made:
        yield made


def episode(tokens: list[int], mask: list[bool] | None = None) -> Episode:
    count = len(tokens)
    sampled = np.ones(count, np.bool_) if mask is None else np.array(mask)
    numbers = np.zeros(count, np.float32), np.zeros(count, np.int32)
    return Episode(np.array([3, 4], np.int32), np.array(tokens, np.int32), *numbers, sampled, "stop", (count - 1,))


def asked(url: str, *episodes: Episode, **settings: Any) -> tuple[list[bytes | BaseException], ScorerReport]:
    """The answer to each episode, all asked at once, and the counters."""

    async def story() -> tuple[list[bytes | BaseException], ScorerReport]:
        made = teacher.TeacherClient(Config(url=url, backoff_s=0.001, **settings))
        answers = await asyncio.gather(*map(made.score, episodes), return_exceptions=True)
        await made.close()
        return answers, made.report()

    return asyncio.run(story())


def test_log_probs_are_those_of_the_model_for_every_token_that_the_policy_sampled(folder: Path, server: Server) -> None:
    mask = [True, False, True, True]
    (column, last), report = asked(server.url, episode([5, 6, VOCABULARY - 1, 1], mask), episode([VOCABULARY - 1]))
    assert isinstance(column, bytes) and isinstance(last, bytes)
    with torch.no_grad():
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logp = lm(torch.tensor([[3, 4, 5, 6, 8, 1]])).logits[0].log_softmax(-1)
    expected = [logp[1, 5].item(), 0.0, logp[3, 8].item(), logp[4, 1].item()]
    assert floats(column).tolist() == pytest.approx(expected, abs=1e-6)
    assert floats(last).tolist() == pytest.approx([logp[1, 8].item()], abs=1e-6)
    assert (report.name, report.calls, report.failed) == ("teacher", 2, 0)
    assert report.mean_s > 0
    assert {one["logprob_start_len"] for one in server.asked} == {1}


def test_of_a_tree_every_sampled_token_has_its_log_prob_on_its_path_and_no_token_is_asked_for_twice(
    folder: Path, server: Server
) -> None:
    # Two answers to the prompt 3 4, one that continues behind the first, and a root; 5, 6, 7, 1 and 2 are sampled.
    mask = [True, True, False, True, False, True, False, True]
    one = episode([5, 6, 4, 7, 6, 1, 3, 2], mask)._replace(branches=branches.column([(4, 0), (6, 2), (8, -1)]))
    ((column,), report) = asked(server.url, one)
    assert isinstance(column, bytes), column
    with torch.no_grad():
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        first, second, third, root = (
            lm(torch.tensor([path])).logits[0].log_softmax(-1)
            for path in ([3, 4, 5, 6], [3, 4, 7], [3, 4, 5, 6, 1], [3, 2])
        )
    expected = [first[1, 5], first[2, 6], 0.0, second[1, 7], 0.0, third[3, 1], 0.0, root[0, 2]]
    assert floats(column).tolist() == pytest.approx([float(number) for number in expected], abs=1e-6)
    assert report.calls == 4
    assert one.trajectory(Identity(task="t", prompt=0, sample=0), "a", Reward(), column).branches == one.branches
    starts = sorted((tuple(call["input_ids"]), call["logprob_start_len"]) for call in server.asked)
    assert starts == [((3, 2), 0), ((3, 4, 5, 6), 1), ((3, 4, 5, 6, 1), 3), ((3, 4, 7), 1)]
    failed, _ = asked(server.url + "/nowhere", one, attempts=1)
    assert isinstance(failed[0], TeacherFailed)


class Twice:
    """An environment that answers with the text twice, until it is "+"."""

    async def reset(self, prompt: Prompt) -> str:
        return prompt.text

    async def step(self, text: str) -> Any:
        return Done(1.0) if text == "+" else Observation(f"{text}{text}=", reward=0.5)


async def _three_turns(tokenizer: Tokenizer, url: str) -> Trajectory:
    """Play "12" and "3" and "+" and give the trajectory the teacher's log-probs."""
    player = Player(Scripted(tokenizer, "12", "3", "+"), tokenizer, Environment(name=f"{__file__}:Twice"))
    played = await player.play(Prompt(text="0+1=", columns={}), Sampling(16))
    made = teacher.TeacherClient(Config(url=url))
    column = await made.score(played)
    await made.close()
    return played.trajectory(Identity(task="t", prompt=0, sample=0), "a", played.reward(Reward()), column)


def test_of_several_turns_every_sampled_token_has_its_log_prob_after_all_before_it_and_no_observation_has_one(
    folder: Path, server: Server
) -> None:
    tokenizer = Tokenizer(folder)
    one = asyncio.run(_three_turns(tokenizer, server.url))
    prompt, tokens, mask = ints(one.prompt_tokens).tolist(), ints(one.tokens).tolist(), flags(one.mask)
    texts = tokenizer.texts(tokens)
    assert "".join(texts) == "12<eos>1212=3<eos>33=+<eos>"
    assert [text for text, sampled in zip(texts, mask, strict=True) if sampled] == ["1", "2", EOS, "3", EOS, "+", EOS]
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logp = lm(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
    places = range(len(prompt), len(prompt) + len(tokens))
    each = [logp[place - 1, token].item() for place, token in zip(places, tokens, strict=True)]
    found = floats(one.teacher_logprobs)
    assert found.tolist() == pytest.approx(np.where(mask, each, 0.0), abs=1e-6)
    assert (found[mask] < -0.01).all() and len(server.asked) == 1


def meta(change: Callable[[list[Any]], Any]) -> Edit:
    """An answer whose entries are changed."""

    def edit(answer: dict[str, Any]) -> tuple[int, Any]:
        entries = answer["meta_info"]["input_token_logprobs"]
        return 200, {"meta_info": {"input_token_logprobs": change(entries)}}

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda answer: (400, {"error": "too long"}), "status 400: .*too long"),
        (lambda answer: (503, "busy"), "Retryable: .*status 503"),
        (lambda answer: (200, {"text": "?"}), "missing required field `meta_info`"),
        (lambda answer: (200, [1]), "Expected `object`, got `array`"),
        (meta(lambda entries: []), "0 log-probs for 2 tokens"),
        (meta(lambda entries: entries[:-1]), "1 log-probs for 2 tokens"),
        (meta(lambda entries: [*entries, entries[1]]), "3 log-probs for 2 tokens"),
        (meta(lambda entries: [entries[0], entries[1], [-1.0, 7, None]]), "a log-prob of token 7 in place of 6"),
        (meta(lambda entries: [entries[0], entries[1], [None, 6, None]]), "a log-prob is not finite"),
        (meta(lambda entries: [entries[0], entries[1], [float("nan"), 6, None]]), "DecodeError: JSON is malformed"),
        (meta(lambda entries: [entries[0], entries[1], ["x", 6, None]]), "Expected `float . null`, got `str`"),
        (meta(lambda entries: [entries[0], entries[1], [-1.0, 2**63, None]]), "Expected `int` <= 2147483647"),
        (meta(lambda entries: [one[:2] for one in entries]), "Expected `array` of length 3"),
    ],
)
def test_an_answer_without_the_log_probs_fails_the_trajectory_with_the_reason(
    server: Server, edit: Edit, reason: str
) -> None:
    server.edit = edit
    (answer,), report = asked(server.url, episode([5, 6]))
    assert isinstance(answer, TeacherFailed)
    with pytest.raises(TeacherFailed, match=reason):
        raise answer
    assert report.failed == (0 if "finite" in reason else 1), "a call that gave numbers has not failed"
    assert len(server.asked) == (3 if "503" in reason else 1)


def test_a_busy_server_is_asked_again_and_a_slow_one_is_given_up(server: Server) -> None:
    def at_the_third(answer: dict[str, Any]) -> tuple[int, Any]:
        return (200, answer) if len(server.asked) == 3 else (503, "")

    server.edit = at_the_third
    (answer,), report = asked(server.url, episode([5]))
    assert isinstance(answer, bytes) and (report.calls, report.failed, report.retries) == (1, 0, 2)
    server.edit, server.latency_s = (lambda answer: (200, answer)), 0.5
    (answer,), report = asked(server.url, episode([5]), timeout_s=0.05)
    assert str(answer) == "no log-probs after 0.05 s" and report.reasons == {"no log-probs after 0.05 s": 1}


def nowhere() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_a_server_that_is_not_there_is_a_failure_of_the_trajectory_and_no_number() -> None:
    (answer,), report = asked(nowhere(), episode([5]), attempts=2)
    assert isinstance(answer, TeacherFailed) and "ConnectError" in str(answer)
    assert (report.calls, report.failed, report.retries) == (1, 1, 1)


# --- at the start --------------------------------------------------------------------------------------------


def connected(tokenizer: Tokenizer, **settings: Any) -> teacher.TeacherClient | None:
    async def story() -> teacher.TeacherClient | None:
        made = await teacher.connect(Config(**settings), tokenizer)
        if made is not None:
            await made.close()
        return made

    return asyncio.run(story())


def test_the_start_finds_a_server_that_is_gone_or_gives_no_log_probs_or_has_another_tokenizer(
    folder: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer(folder)
    assert connected(tokenizer) is None
    assert connected(tokenizer, url=f"{server.url}/") is not None
    assert not caplog.messages
    with pytest.raises(ModelError, match=r"the teacher cannot be reached: Retryable: .*ConnectError"):
        connected(tokenizer, url=nowhere(), backoff_s=0.001)
    with pytest.raises(TaskError, match=r"'NO_SUCH_KEY'.*is not set"):
        connected(tokenizer, url=server.url, key_env="NO_SUCH_KEY")
    server.edit = lambda answer: (200, {"choices": []})
    with pytest.raises(ModelError, match=r"cannot be reached: ValidationError: .*meta_info"):
        connected(tokenizer, url=server.url)
    server.edit, server.shift = (lambda answer: (200, answer)), 1
    with pytest.raises(
        ModelError, match=r"must have the policy's tokenizer: token 0, '<pad>', is '<eos>' there \(9 of 9"
    ):
        connected(tokenizer, url=server.url)


def test_a_server_that_does_not_tell_its_texts_is_used_and_noted(
    folder: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.knows_texts = False
    assert connected(Tokenizer(folder), url=server.url) is not None
    (line,) = caplog.messages
    assert "the teacher's tokenizer cannot be compared with the policy's" in line and "status 404" in line


def test_compared_tokens_are_spread_over_the_whole_vocabulary(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.spread(100) == list(range(9)) and tokenizer.spread(3) == [0, 4, 8]
    assert tokenizer.texts([1, 3]) == ["<eos>", "0"]
