"""The names under which SGLang is given a push are those of the model's files, experts too, or the model is refused."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import model_families
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from streamppo.errors import ModelError
from streamppo.rollout.weight_checks import Architecture
from streamppo.weights.models.settings import settings

SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)),
}


@pytest.mark.parametrize("family", MODELS)
def test_a_push_has_the_names_and_the_bytes_of_the_files(family: str, tmp_path: Path) -> None:
    made = MODELS[family]()
    made.save_pretrained(tmp_path)
    architecture = Architecture(made.config)
    architecture.check_names(str(tmp_path))
    saved = architecture.as_saved({name: one.detach() for name, one in made.named_parameters()})
    files = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == files.keys()
    for name, tensor in files.items():
        assert torch.equal(saved[name], tensor), name


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", model_families.NAMES)
def test_a_push_of_each_family_is_its_files_without_encoders(family: str, tmp_path: Path) -> None:
    """Also of buffers that training leaves unchanged, such as the bias of DeepSeek's routers and Gemma 4's scales."""
    model_families.make(family, tmp_path)
    architecture, files = Architecture(settings(tmp_path)), load_file(tmp_path / "model.safetensors")
    made = model_families.read(tmp_path)
    saved = architecture.as_saved({name: made.get_parameter(name).detach() for name in architecture.shapes})
    assert saved.keys() <= files.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, files[name]), name
    others = files.keys() - saved.keys()
    assert not others if family in model_families.FAMILIES else others
    assert all(any(part in name for part in ("visual", "vision_tower")) for name in others)


@pytest.mark.parametrize(
    ("family", "victim"),
    [("llama", "model.norm.weight"), ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight")],
)
def test_a_model_whose_files_have_other_names_or_shapes_is_refused_by_the_tensor(
    family: str, victim: str, tmp_path: Path
) -> None:
    made = MODELS[family]()
    made.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    files = load_file(path)
    save_file({name: one for name, one in files.items() if name != victim} | {f"{victim}_": files[victim]}, path)
    with pytest.raises(ModelError, match=rf"has {victim} .*no tensor of that name"):
        Architecture(made.config).check_names(str(tmp_path))
    save_file(files | {victim: files[victim][:-1]}, path)
    with pytest.raises(ModelError, match=rf"has {victim} \(.*, but its files have \("):
        Architecture(made.config).check_names(str(tmp_path))


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub: if a file is there, and some of its bytes."""

    folder: ClassVar[Path]

    def do_HEAD(self) -> None:
        self._answer(with_bytes=False)

    def do_GET(self) -> None:
        self._answer(with_bytes=True)

    def _answer(self, *, with_bytes: bool) -> None:
        path = self.folder / self.path.rpartition("/")[2]
        if "/resolve/" not in self.path or not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        raw, asked = path.read_bytes(), self.headers.get("Range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            raw = raw[int(first) : int(last) + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("ETag", '"etag"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if with_bytes:
            self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a model that a hub of this process has, as org/model."""
    folder = tmp_path / "hub"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Hub,), {"folder": folder}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address, files = f"http://127.0.0.1:{server.server_port}", constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files.replace(constants.ENDPOINT, address))
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield folder
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("shard", ["10GB", "4KB"])
def test_a_model_on_the_hub_is_checked_by_the_first_bytes_of_its_files(shard: str, hub: Path) -> None:
    made = MODELS["qwen3_moe"]()
    made.save_pretrained(hub, max_shard_size=shard)
    Architecture(made.config).check_names("org/model")
    victim = "model.layers.1.mlp.experts.3.up_proj.weight"
    for path in hub.glob("*.safetensors"):
        files = load_file(path)
        save_file({f"{name}_" if name == victim else name: one for name, one in files.items()}, path)
    with pytest.raises(ModelError, match=rf"has {victim} .*no tensor of that name"):
        Architecture(made.config).check_names("org/model")


def test_a_hub_that_is_out_of_reach_leaves_its_cache(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MODELS["llama"]()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    neither = "org/model: its files are neither on the hub nor in its cache here"
    with pytest.raises(ModelError, match=neither):
        Architecture(made.config).check_names("org/model")
    cached = tmp_path / "cache" / "models--org--model"
    made.config.save_pretrained(cached / "snapshots" / "1234")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1234")
    with pytest.raises(ModelError, match=neither):
        Architecture(made.config).check_names("org/model")
    made.save_pretrained(cached / "snapshots" / "1234")
    Architecture(made.config).check_names("org/model")


def test_a_model_on_the_hub_without_safetensors_is_refused(hub: Path) -> None:
    (hub / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(ModelError, match="org/model has no safetensors files"):
        Architecture(MODELS["llama"]().config).check_names("org/model")
