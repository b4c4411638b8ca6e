"""Checks that a prompt or a push fits the model, before an engine loads it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from streamppo.errors import ModelError, PromptRefused, WeightsError
from streamppo.types import Ints
from streamppo.weights.models import classes, loading
from streamppo.weights.models.headers import file_header
from streamppo.weights.models.settings import naming

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Architecture:
    """Names and shapes of a model's parameters, in its modules and in its files. Raises `ModelError`."""

    def __init__(self, config: "PreTrainedConfig") -> None:
        with naming(config.name_or_path or config.model_type), torch.device("meta"):
            self._model = classes.make(config)
        self._config = config

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Return name and shape of every tensor in a push of this model; tied tensors appear once."""
        return {name: parameter.shape for name, parameter in self._model.named_parameters()}

    @property
    def encoders(self) -> Sequence[str]:
        """Return the names of a multimodal model's encoders, which are not part of its text model."""
        return getattr(self._model, "encoders", ())

    def as_saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a push's tensors to names and shapes of the model's files, such as experts; add stored buffers."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, {**tensors, **self._buffers})

    @cached_property
    def _buffers(self) -> Mapping[str, Tensor]:
        return loading.stored_buffers(self._config)

    def check_names(self, model: str) -> None:
        """Raise `ModelError` unless the files of `model` have every tensor that `as_saved` makes of a push."""
        files = _shapes_in_files(Path(model)) if Path(model).is_dir() else _shapes_on_hub(model)
        for name, tensor in self.as_saved(dict(self._model.named_parameters())).items():
            if files.get(name) != tuple(tensor.shape):
                raise ModelError(
                    f"a push of this model has {name} {tuple(tensor.shape)}, but its files have "
                    f"{files.get(name, 'no tensor of that name')}: SGLang loads tensors by their names in files"
                )


def _shapes_in_files(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes |= {name: tuple(header.shape) for name, header in file_header(path).items()}
    return shapes


def _shapes_on_hub(model: str) -> dict[str, tuple[int, ...]]:
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, OfflineModeIsEnabled

    try:
        files = HfApi().get_safetensors_metadata(model).files_metadata.values()
    except NotASafetensorsRepoError as error:
        raise ModelError(f"{model} has no safetensors files, and SGLang needs their tensor names: {error}") from error
    except (httpx.TransportError, HfHubHTTPError, OfflineModeIsEnabled) as error:
        with suppress(OSError):
            # The cache may have the model's configuration without its weights.
            if cached := _shapes_in_files(Path(snapshot_download(model, local_files_only=True))):
                return cached
        raise ModelError(f"{model}: its files are neither on the hub nor in its cache here: {error}") from error
    return {name: tuple(tensor.shape) for file in files for name, tensor in file.tensors.items()}


def check_fit(expected: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
    """Raise `WeightsError` unless `tensors` have exactly the `expected` names and shapes."""
    if missing := sorted(expected.keys() - tensors.keys()):
        raise WeightsError(f"the push has no tensor {missing[0]!r} ({len(missing)} are missing)")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise WeightsError(f"the push has tensors that this model lacks: {', '.join(unknown[:3])}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise WeightsError(f"{name} has shape {tuple(tensors[name].shape)}, the model needs {tuple(shape)}")


def check_prompt(prompt: Ints, longest: int, vocabulary: int) -> None:
    """Raise `PromptRefused` for a prompt that would crash the engine and all its completions."""
    if not 1 <= len(prompt) <= longest:
        raise PromptRefused(f"a prompt of {len(prompt)} tokens does not fit: it needs 1 to {longest}")
    # A negative id is a large unsigned number, so one comparison finds negative and too large ids.
    if prompt.view(np.uint32).max() >= vocabulary:
        raise PromptRefused(f"a prompt has a token id outside the model's vocabulary of {vocabulary} tokens")


def cache_error(rows: int, room: int, token_bytes: int) -> ModelError:
    """Make the error of a cache of `rows` rows of `room` tokens that does not fit into memory."""
    return ModelError(
        f"not enough memory for a cache of {rows} completions of {room} tokens, "
        f"{rows * room * token_bytes / 2**30:.1f} GiB: lower rollout.slots, rollout.max_tokens or max_prompt_tokens"
    )
