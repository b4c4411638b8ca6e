"""A bundle from a stranger: a damaged or hostile file ends with one sentence, and nothing that it names is started."""

import gzip
import io
import json
import pickle
import random
import struct
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bundle_case
import numpy as np
import pytest
import tomli_w
import torch
from conftest import trajectory
from msgspec import structs
from test_hostile_checkpoints import Planted
from test_hostile_folders import mutated, put
from transformers import GPTJConfig, GPTJForCausalLM

from streamppo import cli
from streamppo.commands.bundle import file
from streamppo.commands.bundle.file import Bundle
from streamppo.config import consent
from streamppo.types import Batch

STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pickle.find_class")
"""Audit events of whatever starts something, or reads a pickle."""
seen: list[str] = []


def noted(event: str, arguments: tuple[object, ...]) -> None:
    if event in STARTS or (event == "socket.connect" and "127.0.0.1" not in str(arguments)):
        seen.append(f"{event} {arguments}")


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a whole bundle, whose update was made once: its digest is in it."""
    # It cannot be taken away again.
    sys.addaudithook(noted)
    path = tmp_path_factory.mktemp("whole") / "math-4.safetensors"
    found = bundle_case.bundle(folder)
    file.write(path, facts(digest=bundle_case.digest(path.with_name("first"), found))(found))
    return path


@pytest.fixture(autouse=True)
def nothing_is_started() -> Iterator[None]:
    seen.clear()
    yield
    assert not seen


def ends(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """The exit code of a replay, and its sentence; every other line is of the result."""
    capsys.readouterr()
    code = cli.main(["replay", str(path), *options])
    told = capsys.readouterr()
    sentences = [line for line in told.err.splitlines() if line.startswith("streamppo: ")]
    assert "Traceback" not in told.out + told.err and "\x1b]" not in told.out + told.err
    assert len(sentences) == (code != 0), told.err
    return code, "".join(sentences)


def test_the_whole_file_is_made_again(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(whole, capsys) == (0, "")


# --- the container -------------------------------------------------------------------------------------------


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: object, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def changed(content: bytes, name: str, **entry: object) -> bytes:
    """The file with another entry of a tensor in its header."""
    header, data = split(content)
    header[name] = {**header[name], **entry}
    return joined(header, data)


def bomb(_: bytes) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../marker", bytes(2**26))
    return whole.getvalue()


TOKENS, WEIGHT = "batch.tokens", "policy.lm.model.norm.weight"
HUGE = 2**62
CONTAINERS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "seven bytes": lambda whole: whole[:7],
    "no header": lambda whole: whole[:8],
    "half of it": lambda whole: whole[: len(whole) // 2],
    "a byte too few": lambda whole: whole[:-1],
    "a byte too many": lambda whole: whole + b"\0",
    "zeros": lambda _: bytes(4096),
    "a pickle": lambda _: pickle.dumps(Planted(Path("/tmp/obeyed-by-a-bundle"))),
    "a pickle of torch": lambda _: torch_pickle(),
    "a bomb of zip": bomb,
    "a bomb of gzip": lambda _: gzip.compress(bytes(2**24)),
    "a header without end": lambda whole: struct.pack("<Q", HUGE) + whole[8:],
    "a header of 100 MB": lambda whole: struct.pack("<Q", 100_000_000) + whole[8:],
    "a header that is nested for ever": lambda whole: joined(b'{"a":' + b"[" * 100_000, split(whole)[1]),
    "a header that is a list": lambda whole: joined([1, 2], split(whole)[1]),
    "a header that is not text": lambda whole: joined(b"\xff\xfe{}", split(whole)[1]),
    "a header without tensors": lambda whole: joined({"__metadata__": split(whole)[0]["__metadata__"]}, b""),
    "no metadata": lambda whole: joined({**split(whole)[0], "__metadata__": {}}, split(whole)[1]),
    "metadata of numbers": lambda whole: joined({**split(whole)[0], "__metadata__": {"bundle": 3}}, split(whole)[1]),
    "an absurd shape": lambda whole: changed(whole, TOKENS, shape=[HUGE]),
    "a shape whose product is too large": lambda whole: changed(whole, TOKENS, shape=[2**40, 2**40]),
    "a shape below zero": lambda whole: changed(whole, TOKENS, shape=[-1]),
    "a shape of no numbers": lambda whole: changed(whole, TOKENS, shape=["a"]),
    "a shape of 10,000 sides": lambda whole: changed(whole, WEIGHT, shape=[1] * 10_000),
    "another type": lambda whole: changed(whole, TOKENS, dtype="F32"),
    "a type of 8 bits": lambda whole: changed(whole, WEIGHT, dtype="F8_E4M3"),
    "a type that there is not": lambda whole: changed(whole, TOKENS, dtype="O"),
    "an offset beyond the end": lambda whole: changed(whole, TOKENS, data_offsets=[0, HUGE]),
    "an offset below zero": lambda whole: changed(whole, TOKENS, data_offsets=[-8, 0]),
    "offsets in the wrong order": lambda whole: changed(whole, TOKENS, data_offsets=[100, 50]),
    "two tensors at one place": lambda whole: changed(
        whole, TOKENS, data_offsets=split(whole)[0]["batch.versions"]["data_offsets"]
    ),
}


def torch_pickle() -> bytes:
    whole = io.BytesIO()
    torch.save({"a": Planted(Path("/tmp/obeyed-by-a-bundle"))}, whole)
    return whole.getvalue()


@pytest.mark.parametrize("what", CONTAINERS)
def test_another_container_ends_with_a_sentence(
    what: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.safetensors"
    content = CONTAINERS[what](whole.read_bytes())
    path.write_bytes(content)
    code, told = ends(path, capsys)
    assert code == 1 and "BundleError" in told and str(path) in told
    assert not Path("/tmp/obeyed-by-a-bundle").exists() and not (tmp_path.parent / "marker").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a pipe", "a device without end", "a socket", "a link to itself", "a folder"])
def test_what_is_no_file_ends_with_a_sentence(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(kind, tmp_path / "a.safetensors")
    assert ends(tmp_path / "a.safetensors", capsys)[0] == 1


def test_a_link_to_a_bundle_is_that_bundle_and_nothing_is_written_beside_it(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(whole)
    before = sorted(whole.parent.iterdir())
    assert ends(tmp_path / "link", capsys)[0] == 0
    assert sorted(whole.parent.iterdir()) == before and [path.name for path in tmp_path.iterdir()] == ["link"]


# --- its content ---------------------------------------------------------------------------------------------


def facts(**values: object) -> Callable[[Bundle], Bundle]:
    return lambda found: found._replace(facts=structs.replace(found.facts, **values))


def state(**values: object) -> Callable[[Bundle], Bundle]:
    return lambda found: facts(state=structs.replace(found.facts.state, **values))(found)


def config(path: str, value: object) -> Callable[[Bundle], Bundle]:
    """Another value of the field at a dotted path."""

    def make(found: Bundle) -> Bundle:
        tree: dict[str, Any] = tomllib.loads(found.config)
        *sections, name = path.split(".")
        table = tree
        for section in sections:
            table = table[section]
        table[name] = value
        return found._replace(config=tomli_w.dumps(tree))

    return make


def model(**values: object) -> Callable[[Bundle], Bundle]:
    """Other values in config.json."""

    def make(found: Bundle) -> Bundle:
        known = json.loads(found.tensors["files.config.json"].numpy().tobytes())
        return tensor("files.config.json", text(json.dumps({**known, **values})))(found)

    return make


def tensor(name: str, value: object) -> Callable[[Bundle], Bundle]:
    def make(found: Bundle) -> Bundle:
        others = {key: one for key, one in found.tensors.items() if key != name}
        put = value(found.tensors[name]) if callable(value) else value
        return found._replace(tensors=others if put is None else {**others, name: put})

    return make


def text(content: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)


def batch(change: Callable[[Batch], Batch]) -> Callable[[Bundle], Bundle]:
    def make(found: Bundle) -> Bundle:
        other = change(found.batch)
        return facts(rows=len(other.trajectories))(found._replace(batch=other))

    return make


def row(**values: object) -> Callable[[Bundle], Bundle]:
    """Other values of the first row."""
    return batch(
        lambda found: structs.replace(
            found, trajectories=(structs.replace(found.trajectories[0], **values), *found.trajectories[1:])
        )
    )


def wide(found: Batch) -> Batch:
    """Few tokens in the file, which are too many once each row is as wide as the longest."""
    rows = [trajectory([3], number=number) for number in range(4000)]
    return structs.replace(found, trajectories=(*rows, trajectory([3] * 60_000, number=4000)))


def both(first: Callable[[Bundle], Bundle], second: Callable[[Bundle], Bundle]) -> Callable[[Bundle], Bundle]:
    return lambda found: second(first(found))


DETACHED = config("queue.segments", {"max_tokens": 2, "prefix": "detached"})


def endless(found: Bundle) -> Bundle:
    """A model whose positions are in no weight, and in a buffer."""
    settings = GPTJConfig(vocab_size=17, n_positions=2**33, n_embd=8, n_layer=1, n_head=1, rotary_dim=8)
    with torch.device("meta"):
        lm = GPTJForCausalLM(settings)
    weights = {f"policy.lm.{name}": torch.zeros(one.shape) for name, one in lm.named_parameters()}
    return found._replace(tensors={**weights, "files.config.json": text(settings.to_json_string())})


DEEP = "[" * 100_000
LENGTH = len(bundle_case.case.batch(3).trajectories[0].logprobs) // 4
CONTENTS: dict[str, Callable[[Bundle], Bundle]] = {
    "a version below zero": state(version=-1),
    "a version beyond all": state(version=2**40),
    "another version": state(version=7),
    "another digest": state(digest="0" * 64),
    "an endless weight of the KL": state(beta=1e308),
    "rows that it has not": facts(kept=(1, 2)),
    "a count of rows": facts(rows=10**9),
    "names of a terminal's orders": facts(run="\x1b]0;x\x07\u202e", digest="\x1b[2J"),
    "a lag that is none": state(lag=(-(2**62), 1e300, 2**62)),
    "a configuration that is nested for ever": lambda found: found._replace(config=f"a = {DEEP}"),
    "no configuration": lambda found: found._replace(config=""),
    "a configuration that is not text of TOML": lambda found: found._replace(config="\x00\x01"),
    "a billion epochs": config("learner.epochs", 10**9),
    "a trillion threads": config("learner.threads", 10**12),
    "a seed beyond all": config("seed", 10**30),
    "a loss of foreign code": config("algorithm.policy_loss", {"kind": "function", "function": "os:system"}),
    "a model elsewhere as critic": config("algorithm.critic.model", "/etc"),
    "a teacher elsewhere": config("algorithm.teacher", {"model": "someone/teacher"}),
    "a rate of no number": config("learner.lr", float("nan")),
    "compiled layers": config("model.compile", True),
    "a billion layers": model(num_hidden_layers=10**9, layer_types=None),
    "many layers": model(num_hidden_layers=4000, layer_types=None),
    "a width beyond all": model(hidden_size=2**40),
    "a width of another model": model(intermediate_size=64),
    "heads of a width beyond all": model(head_dim=2**40),
    "a vocabulary beyond all": model(vocab_size=2**50),
    "layers below zero": model(num_hidden_layers=-1),
    "heads of nothing": model(num_attention_heads=0),
    "code that comes with the model": model(auto_map={"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Y"}),
    "a kind of model that there is not": model(model_type="evil"),
    "a model that is none of language": model(model_type="vit"),
    "weights of a quantiser": model(quantization_config={"quant_method": "gptq"}),
    "positions without end": endless,
    "an attention of the hub": model(_attn_implementation="someone/kernel", attn_implementation="someone/kernel"),
    "a rope that is none": model(rope_scaling={"rope_type": "evil", "factor": -1}),
    "a nested config.json": tensor("files.config.json", text('{"a": ' + DEEP)),
    "no config.json": tensor("files.config.json", None),
    "a config.json of numbers": tensor("files.config.json", torch.ones(8)),
    "a file out of the folder": tensor("files...", text("x")),
    "a file that says where weights are": tensor("files.model.safetensors.index.json", text("{}")),
    "a file of code": tensor("files.modeling_x.py", text("import os")),
    "a pickle of weights": tensor("files.pytorch_model.bin", text("x")),
    "a tokenizer that is nested for ever": tensor("files.tokenizer.json", text(DEEP)),
    "a tokenizer of orders": tensor("files.tokenizer_config.json", text('{"auto_map": {"AutoTokenizer": ["x.Y"]}}')),
    "no weights": lambda found: found._replace(tensors={"files.config.json": found.tensors["files.config.json"]}),
    "a weight that is missing": tensor(WEIGHT, None),
    "a weight of another shape": tensor(WEIGHT, lambda one: one[:1]),
    "a weight of another type": tensor(WEIGHT, lambda one: one.double()),
    "a weight without a number": tensor(WEIGHT, lambda one: one * torch.nan),
    "other weights": tensor(WEIGHT, lambda one: one + 1),
    "a moment that is missing": tensor(f"optimizer.{WEIGHT[7:]}.exp_avg", None),
    "a moment of another shape": tensor(f"optimizer.{WEIGHT[7:]}.exp_avg", lambda one: one[:1]),
    "moments without a number": tensor(f"optimizer.{WEIGHT[7:]}.exp_avg", lambda one: one * torch.nan),
    "a state of random numbers that is none": tensor("rng", lambda: None),
    "tokens beyond the vocabulary": row(tokens=np.full(LENGTH, 10**6, np.int32).tobytes()),
    "log-probs without a number": row(logprobs=np.full(LENGTH, np.nan, np.float32).tobytes()),
    "log-probs above zero": row(logprobs=np.full(LENGTH, 3e38, np.float32).tobytes()),
    "versions of the future": row(versions=np.full(LENGTH, 2**31 - 1, np.int32).tobytes()),
    "versions below zero": row(versions=np.full(LENGTH, -(2**31), np.int32).tobytes()),
    "a reward beyond all": row(reward=1e308),
    "a prefix beyond the prompt": both(DETACHED, row(prefix=2**40, identity=bundle_case.identity(segment=1))),
    "a prefix below zero": both(DETACHED, row(prefix=-5, identity=bundle_case.identity(segment=1))),
    "experts that there are not": both(
        config("rollout.engine", {"kind": "sglang", "routes": True}), row(routes=np.full(30, 999, np.int16).tobytes())
    ),
    "rows too wide to be padded": batch(wide),
}
CONTENTS["a state of random numbers that is none"] = lambda found: found._replace(
    tensors={**found.tensors, "rng": torch.ones(3, dtype=torch.uint8)}
)
HARMLESS = {
    *("an endless weight of the KL", "a lag that is none", "a tokenizer of orders"),
    *("code that comes with the model", "an attention of the hub", "a tokenizer that is nested for ever"),
}
"""What the update does not read."""
EITHER = {"a trillion threads": "has other weights than in the run"}
"""The update is computed by at most `MOST_THREADS`: on some machines with the bits of one thread, else with these
words."""
REASONS = {
    **{"a billion layers": "num_hidden_layers = 1000000000", "many layers": "num_hidden_layers = 4000"},
    **{"a billion epochs": "optimizer steps in one update", "rows too wide to be padded": "too many to be padded"},
    **{
        "a model elsewhere as critic": "names models outside the bundle",
        "a teacher elsewhere": "names models outside the bundle",
    },
    **{"a loss of foreign code": "--trust", "a file of code": "a tensor 'files.modeling_x.py'"},
    **{
        "a file that says where weights are": "is no file of a model or tokenizer",
        "a pickle of weights": "a tensor 'files.",
    },
    **{"positions without end": "buffers are too large", "a width of another model": "in config.json"},
    **{"tokens beyond the vocabulary": "token 1000000", "other weights": "not those of version 3"},
}
"""Words of our own bounds: without one, another error would hide that it is gone."""


@pytest.mark.sampled(9)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", CONTENTS)
def test_other_content_ends_with_a_sentence(
    what: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.safetensors"
    file.write(path, CONTENTS[what](file.read(whole)))
    code, told = ends(path, capsys)
    is_harmless = EITHER[what] not in told if what in EITHER else what in HARMLESS
    assert (code == 0) == is_harmless, told
    assert REASONS.get(what, "") in told, told
    assert code == 0 or str(path) in told, told


def test_code_of_a_stranger_is_asked_about_and_agreed_to_once(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, found = tmp_path / "a.safetensors", file.read(whole)
    changed = config("algorithm.policy_loss", {"kind": "function", "function": "sign_loss:loss"})(found)
    file.write(path, changed)
    code, told = ends(path, capsys)
    assert code == 2 and "sign_loss:loss" in told and "--trust" in told
    assert "sign_loss:loss" not in ends(path, capsys, "--trust")[1]
    assert "--trust" not in ends(path, capsys)[1]
    assert path.with_name(f"{path.name}.{consent.FILE}").is_file()


# --- at random -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 120))])
def test_random_mutations_end_with_a_sentence(
    seed: int, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the header, of the facts, of the configuration, and of all bytes."""
    rng, path, content = random.Random(seed), tmp_path / "a.safetensors", whole.read_bytes()
    header, data = split(content)
    match seed % 4:
        case 0:
            content = mutated(content, rng)
        case 1:
            text = mutated(content[8 : len(content) - len(data)], rng)
            content = joined(text, data)
        case part:
            name = "bundle" if part == 2 else "config"
            text = mutated(header["__metadata__"][name].encode(), rng).decode(errors="replace")
            header["__metadata__"][name] = text
            content = joined(header, data)
    path.write_bytes(content)
    ends(path, capsys)
