"""Small random checkpoints whose language model takes images: 4 layers, hidden 64, fp32, a vision
tower of two layers.

`python tests/engine/tiny_vision.py FOLDER [NAME …]` writes them.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file
from tiny import _GROUPED, VOCABULARY, WINDOW, Checkpoint
from transformers import PreTrainedTokenizerFast

from midstream.workers.engine.no_torchvision import stand_in

_TEXT: dict[str, Any] = _GROUPED | {"head_dim": 32}
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.15,
}
#: Sizes of an image, in pixels, that LLaVA-NeXT cuts into squares of `image_size`.
_GRID = [[28, 56], [56, 28], [56, 56]]
_MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
}
_INTERLEAVED = {"rope_parameters": _MROPE["rope_parameters"] | {"mrope_interleaved": True}}
_QWEN_TOKENS = {
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
_QWEN2_VISION = {
    "depth": 2,
    "embed_dim": 64,
    "hidden_size": 64,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
_QWEN25_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
_QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 64,
}


def _vision(
    name: str, config: str, text: dict[str, Any], vision: dict[str, Any], **options: Any
) -> Checkpoint:
    shared = {"tie_word_embeddings": False, "text_config": text, "vision_config": vision}
    return Checkpoint(f"{name}ForConditionalGeneration", f"{config}Config", shared | options)


def _narrow(model_type: str, **options: Any) -> dict[str, Any]:
    return (
        _GROUPED
        | {"model_type": model_type, "num_attention_heads": 2, "num_key_value_heads": 1}
        | options
    )


def _shuffled(name: str) -> Checkpoint:
    """Idefics 3 and those built like it."""
    vision = _VISION | {"model_type": f"{name.lower()}_vision"}
    return _vision(
        name,
        name,
        _TEXT | {"model_type": "llama"},
        vision,
        image_token_id=500,
        scale_factor=2,
        pad_token_id=None,
    )


CHECKPOINTS: dict[str, Checkpoint] = {
    "llava": _vision(
        "Llava",
        "Llava",
        _TEXT | {"model_type": "llama"},
        _VISION | {"model_type": "clip_vision_model"},
        image_token_index=500,
    ),
    "mistral3": _vision(
        "Mistral3",
        "Mistral3",
        _TEXT | {"model_type": "mistral"},
        _VISION | {"model_type": "pixtral", "head_dim": 32},
        image_token_index=500,
    ),
    "gemma3": _vision(
        "Gemma3",
        "Gemma3",
        _TEXT
        | {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        }
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        _VISION | {"model_type": "siglip_vision_model"},
        image_token_index=500,
        boi_token_index=502,
        eoi_token_index=503,
        mm_tokens_per_image=4,
        tie_word_embeddings=True,
    ),
    "qwen2-vl": _vision(
        "Qwen2VL", "Qwen2VL", _narrow("qwen2_vl_text", **_MROPE), _QWEN2_VISION, **_QWEN_TOKENS
    ),
    "qwen2.5-vl": _vision(
        "Qwen2_5_VL",
        "Qwen2_5_VL",
        _narrow("qwen2_5_vl_text", **_MROPE),
        _QWEN25_VISION,
        **_QWEN_TOKENS,
    ),
    "qwen3-vl": _vision(
        "Qwen3VL",
        "Qwen3VL",
        _TEXT | {"model_type": "qwen3_vl_text"} | _INTERLEAVED,
        _QWEN3_VISION,
        **_QWEN_TOKENS,
    ),
    "idefics3": _shuffled("Idefics3"),
    "smolvlm": _shuffled("SmolVLM"),
    "internvl": _vision(
        "InternVL",
        "InternVL",
        _narrow("qwen2"),
        _VISION | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
        image_token_id=500,
        downsample_ratio=0.5,
    ),
    "llava-next": _vision(
        "LlavaNext",
        "LlavaNext",
        _TEXT | {"model_type": "llama"},
        _VISION | {"model_type": "clip_vision_model"},
        image_token_index=500,
        image_grid_pinpoints=_GRID,
    ),
    "llava-onevision": _vision(
        "LlavaOnevision",
        "LlavaOnevision",
        _narrow("qwen2"),
        _VISION | {"model_type": "siglip_vision_model"},
        image_token_index=500,
        video_token_index=501,
        image_grid_pinpoints=_GRID,
    ),
}
#: Served by nothing: every token of a prompt attends to all others.
REFUSED: dict[str, Checkpoint] = {
    "paligemma": _vision(
        "PaliGemma",
        "PaliGemma",
        _TEXT | {"model_type": "gemma", "tie_word_embeddings": True},
        _VISION | {"model_type": "siglip_vision_model", "projection_dim": 64},
        image_token_index=500,
        projection_dim=64,
        hidden_size=64,
        tie_word_embeddings=True,
    ),
}


def _words(special: dict[int, str]) -> Any:
    """The tokenizer of the tiny checkpoints, in which some words are special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {special.get(number, f"w{number}"): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="w510", pad_token="w511"
    )
    made.add_special_tokens(
        {"additional_special_tokens": list(special.values())}, replace_extra_special_tokens=False
    )
    return made


def _pil(model: str, name: str, **options: Any) -> Any:
    """transformers' image processor for PIL."""
    module = importlib.import_module(f"transformers.models.{model}.image_processing_pil_{model}")
    return getattr(module, f"{name}ImageProcessorPil")(**options)


_CLIP = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
_IMAGE = {500: "<image>"}
_TILES = {
    460 + 6 * row + column: f"<row_{row + 1}_col_{column + 1}>"
    for row in range(6)
    for column in range(6)
}


def _llava() -> Any:
    return transformers.LlavaProcessor(
        _pil("clip", "CLIP", **_CLIP),
        _words(_IMAGE),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _llava_next() -> Any:
    return transformers.LlavaNextProcessor(
        _pil("llava_next", "LlavaNext", **_CLIP, image_grid_pinpoints=_GRID),
        _words(_IMAGE),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _idefics3() -> Any:
    special = (
        _IMAGE
        | {502: "<fake_token_around_image>", 503: "<global-img>", 504: "<end_of_utterance>"}
        | _TILES
    )
    images = _pil(
        "idefics3", "Idefics3", size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
    )
    return transformers.Idefics3Processor(images, _words(special), image_seq_len=1)


def _mistral3() -> Any:
    images = _pil(
        "pixtral", "Pixtral", size={"longest_edge": 56}, patch_size={"height": 14, "width": 14}
    )
    words = _words({500: "[IMG]", 502: "[IMG_BREAK]", 503: "[IMG_END]"})
    return transformers.PixtralProcessor(images, words, patch_size=14, spatial_merge_size=2)


_QWEN_WORDS = {
    500: "<|image_pad|>",
    501: "<|video_pad|>",
    502: "<|vision_start|>",
    503: "<|vision_end|>",
}


def _qwen(name: str, patch_size: int = 14) -> Any:
    size = {"shortest_edge": (2 * patch_size) ** 2, "longest_edge": (8 * patch_size) ** 2}
    images = _pil("qwen2_vl", "Qwen2VL", size=size, patch_size=patch_size)
    videos = getattr(
        transformers, "Qwen3VLVideoProcessor" if name == "Qwen3VL" else "Qwen2VLVideoProcessor"
    )
    return getattr(transformers, f"{name}Processor")(images, _words(_QWEN_WORDS), videos())


#: Name → its processor, which runs without torchvision.
PROCESSORS: dict[str, Callable[[], Any]] = {
    "llava": _llava,
    "llava-next": _llava_next,
    "idefics3": _idefics3,
    "mistral3": _mistral3,
    "qwen2-vl": lambda: _qwen("Qwen2VL"),
    "qwen2.5-vl": lambda: _qwen("Qwen2_5_VL"),
    "qwen3-vl": lambda: _qwen("Qwen3VL", 16),
}
#: How a prompt has an image.
_QWEN_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
PLACES = {
    "mistral3": "[IMG]",
    "qwen2-vl": _QWEN_PLACE,
    "qwen2.5-vl": _QWEN_PLACE,
    "qwen3-vl": _QWEN_PLACE,
}
#: Each message, its parts in turn; an image is its placeholder.
CHAT = (
    "{% for message in messages %}w3 {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif "
    "%}{% endfor %}{% endfor %}w4"
)


def with_images(name: str, path: Path) -> Path:
    """Write the named checkpoint with its processor and a chat template, unless it is there."""
    stand_in()
    checkpoint(name, path)
    if not (path / "processor_config.json").exists():
        processor = PROCESSORS[name]()
        processor.tokenizer.chat_template = CHAT.replace("<image>", PLACES.get(name, "<image>"))
        processor.save_pretrained(path)
        processor.tokenizer.save_pretrained(path)
        if name.startswith("llava"):
            _as_published(path / "model.safetensors")
    return path


def _as_published(file: Path) -> None:
    """transformers leaves out a level of the encoder's names, which the checkpoints on the hub have
    and vLLM expects.
    """
    tensors = load_file(file)
    level = "vision_tower.vision_model."
    named = {
        key if level in key else key.replace("vision_tower.", level): value
        for key, value in tensors.items()
    }
    save_file(named, file, metadata={"format": "pt"})


def checkpoint(name: str, path: Path) -> Path:
    """Write the named checkpoint to `path`, unless it is there."""
    return (CHECKPOINTS | REFUSED)[name].make(path)


if __name__ == "__main__":
    for chosen in sys.argv[2:] or CHECKPOINTS:
        print(checkpoint(chosen, Path(sys.argv[1]) / chosen))
