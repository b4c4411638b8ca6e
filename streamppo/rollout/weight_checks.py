"""Checks that a prompt, or a push of weights, fits the model before an engine takes it."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from streamppo.errors import ModelError, WeightsError
from streamppo.types import Ints

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Architecture:
    """The parameters of a model, by the names of its modules and by those of its files; no weights are loaded."""

    def __init__(self, config: "PreTrainedConfig") -> None:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Name and shape of every tensor that a push of this model holds; tied ones stand in it once."""
        return {name: parameter.shape for name, parameter in self._model.named_parameters()}

    def as_saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name and cut the tensors of a push as the model's files do: engines load those.

        Modules may differ from files: transformers keeps the experts of a layer in one tensor.
        """
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, dict(tensors))

    def check_names(self, model: str) -> None:
        """Raise `ModelError` unless the files of `model` have every tensor that `as_saved` makes of a push.

        transformers reads files in several ways, and does not undo all of them: an engine would look for such a tensor
        under another name, and keep what it has. The files' first bytes are read alone, in a folder or from the hub.
        """
        files = _shapes_in_files(Path(model)) if Path(model).is_dir() else _shapes_on_hub(model)
        for name, tensor in self.as_saved(dict(self._model.named_parameters())).items():
            if files.get(name) != tuple(tensor.shape):
                raise ModelError(
                    f"a push of this model would bring {name} {tuple(tensor.shape)}, and its files have "
                    f"{files.get(name, 'no tensor of that name')}: SGLang goes by the names of files"
                )


def _shapes_in_files(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a folder's safetensors files."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def _shapes_on_hub(model: str) -> dict[str, tuple[int, ...]]:
    """The same of a model by its name; where the hub is out of reach, of the files in its cache."""
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, OfflineModeIsEnabled

    try:
        files = HfApi().get_safetensors_metadata(model).files_metadata.values()
    except NotASafetensorsRepoError as error:
        raise ModelError(f"{model} has no safetensors files, by whose names SGLang goes: {error}") from error
    except (httpx.TransportError, HfHubHTTPError, OfflineModeIsEnabled) as error:
        with suppress(OSError):
            # A cache may have a model's configuration alone.
            if cached := _shapes_in_files(Path(snapshot_download(model, local_files_only=True))):
                return cached
        raise ModelError(f"{model}: its files are neither on the hub nor in its cache here: {error}") from error
    return {name: tuple(tensor.shape) for file in files for name, tensor in file.tensors.items()}


def check_fit(expected: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
    """Raise `WeightsError` unless `tensors` are exactly the `expected` ones."""
    if missing := sorted(expected.keys() - tensors.keys()):
        raise WeightsError(f"the push has no tensor {missing[0]!r} ({len(missing)} are missing)")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise WeightsError(f"the push has tensors that this model does not know: {', '.join(unknown[:3])}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise WeightsError(f"{name} has shape {tuple(tensors[name].shape)}, the model wants {tuple(shape)}")


def check_prompt(prompt: Ints, longest: int, vocabulary: int) -> None:
    """Raise `ModelError` for a prompt that would crash the engine, and with it the completions of others."""
    if not 1 <= len(prompt) <= longest:
        raise ModelError(f"a prompt of {len(prompt)} tokens does not fit: it needs 1 to {longest}")
    # Negative ids are large ones without their sign: one look at the tokens is enough.
    if prompt.view(np.uint32).max() >= vocabulary:
        raise ModelError(f"a prompt holds a token that is not one of the model's {vocabulary}")
