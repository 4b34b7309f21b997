"""Checks a checkpoint's folder: it must have a config, and as many layers as the config says."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...schemas.base.errors import MidstreamError, Translated
from ...schemas.settings.settings import Settings

#: A weight of a numbered layer, such as `model.layers.3.mlp.up_proj.weight` or
#: `transformer.h.3.ln_1.bias`.
_OF_LAYER = re.compile(r"^(?P<stack>.*?)\.(?P<number>\d+)\.")

#: Config fields with the number of multi-token prediction layers, which follow the model's own.
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def check_folder(settings: Settings) -> None:
    """Raises MidstreamError if `model` is a folder without a valid config; vLLM checks hub names
    and files.
    """
    folder = Path(settings.model).expanduser()
    named = "hf_config_path" in settings.engine_options
    if (
        folder.is_dir()
        and not named
        and not any((folder / name).is_file() for name in ("config.json", "params.json"))
    ):
        raise _refused(
            f"{folder} has no config.json: `model` is the folder of a checkpoint, with its "
            "config, weights and tokenizer"
        )
    if folder.is_dir() and (folder / "config.json").is_file():
        with Translated(
            ValueError, lambda error: _refused(f"{folder / 'config.json'} is not JSON: {error}")
        ):
            config = json.loads((folder / "config.json").read_bytes())
        if not isinstance(config, dict):
            raise _refused(f"{folder / 'config.json'} is not a JSON object")


def check_layers(model: str, config: Any, layers: int) -> None:
    """Raises MidstreamError if the weights in the folder `model` have a different number of layers
    from the config.

    `config`: transformers' config of the language model. `layers`: vLLM's count of its layers. vLLM
    checks other formats than safetensors, and checkpoints whose weights are numbered differently.
    """
    stacks: dict[str, int] = {}
    for name in _weight_names(Path(model)):
        if match := _OF_LAYER.match(name):
            stacks[match["stack"]] = max(stacks.get(match["stack"], 0), int(match["number"]) + 1)
    extra = max(int(getattr(config, name, None) or 0) for name in _MTP_LAYERS)
    if stacks and not any(layers <= count <= layers + extra for count in stacks.values()):
        stack, present = max(stacks.items(), key=lambda item: item[1])
        raise _refused(
            f"the config says {layers} layers, and the weights have {present} ({stack}.0 to "
            f"{stack}.{present - 1}): config and weights "
            "belong to different checkpoints, or num_hidden_layers is wrong"
        )


def _weight_names(folder: Path) -> Iterable[str]:
    index = folder / "model.safetensors.index.json"
    with Translated(
        (OSError, ValueError, KeyError, TypeError, SafetensorError),
        lambda error: _refused(f"the weights in {folder} cannot be read: {error}"),
    ):
        if index.is_file():
            return list(json.loads(index.read_bytes())["weight_map"])
        names: list[str] = []
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="np") as weights:
                names += weights.keys()
    return names


def _refused(detail: str) -> MidstreamError:
    return MidstreamError("invalid_request", detail, field="model")
