"""Images of prompts on the worker: which images the model takes, and how prompts are expanded.

vLLM's renderer runs the model's own processor, which replaces the placeholder of each image by as
many tokens as the image takes. The API cannot: it has no code of transformers' and vLLM's
processors, arithmetic of its own would be wrong for some model, and it accepts jobs without a live
worker. Positions that were resolved against the prompt as written are mapped here to the expanded
prompt, before anything of the request reaches the engine.
"""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from PIL import Image
from vllm import TokensPrompt
from vllm.config import CompilationMode, VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.image import convert_image_mode, normalize_image
from vllm.multimodal.processing import ProcessorInputs, TimingContext

from ....schemas.artifacts.probes import StoredProbe
from ....schemas.base.errors import MidstreamError, Translated
from ....schemas.prompts.images import ImageRef, ImageSpan, check_size, of_image
from ....schemas.prompts.selectors import PositionSelector, PositionWindow
from ..protocol import EngineRequest

#: Architectures whose rows of prompts with images were compared with transformers'. The certificate
#: says nothing of images, and of several images in a prompt of LLaVA-OneVision, vLLM alone cuts
#: each into tiles.
COMPARED = frozenset(
    f"{name}ForConditionalGeneration"
    for name in ("Idefics3", "Llava", "LlavaNext", "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
)
#: Size of the image that is processed to find a model's placeholder.
_PROBE_SIZE = (64, 48)


class Expansion(NamedTuple):
    """An expanded prompt, and where its images are in it and in the prompt as written."""

    token_ids: list[int]
    images: list[tuple[ImageRef, ImageSpan]]  # in the order of the prompt

    def place(self, position: int, at: str) -> range:
        """Return the expanded positions of a position in the prompt as written.

        Raises MidstreamError naming the field `at` for a token that an image does not have.
        """
        if (named := of_image(position)) is not None:
            image, token = named
            span = self.images[image][1]
            if token >= span.stop - span.start:
                allowed = f"0 to {span.stop - span.start - 1}"
                raise MidstreamError(
                    "invalid_request",
                    f"image {image} has no token {token}",
                    field=at,
                    allowed=allowed,
                )
            return range(span.start + token, span.start + token + 1)
        shift = 0
        for ref, span in self.images:
            if position < ref.start:
                break
            if position < ref.stop:
                return range(span.start, span.stop)
            shift = span.stop - ref.stop
        return range(position + shift, position + shift + 1)

    def map(self, selector: PositionSelector, at: str) -> PositionSelector:
        """Map a selector of positions in the prompt as written to the expanded prompt."""
        if isinstance(selector, str):
            return selector
        if isinstance(selector, PositionWindow):
            stop = None if selector.stop is None else self.place(selector.stop, at).start
            return PositionWindow(start=self.place(selector.start, at).start, stop=stop)
        return sorted({position for written in selector for position in self.place(written, at)})


def expanded(ask: EngineRequest, rendered: Any) -> EngineRequest:
    """Returns the request with the expanded prompt's tokens and positions.

    `rendered`: vLLM's rendering of the prompt.
    """
    expansion = align(ask.token_ids, ask.images, rendered)
    return dataclasses.replace(
        ask,
        token_ids=expansion.token_ids,
        steering=[
            msgspec.structs.replace(entry, positions=expansion.map(entry.positions, "steering"))
            for entry in ask.steering
        ],
        captures=[
            msgspec.structs.replace(
                capture, positions=expansion.map(capture.positions, "capture.positions")
            )
            for capture in ask.captures
        ],
        spans=[span for _, span in expansion.images],
        probes=[_with_expanded_sight(probe, expansion) for probe in ask.probes],
    )


def _with_expanded_sight(probe: StoredProbe, expansion: Expansion) -> StoredProbe:
    """Return a probe whose policy reads the same of the expanded prompt."""
    if probe.policy is None or probe.policy.sight is None:
        return probe
    runs = [
        (expansion.place(start, "messages").start, expansion.place(stop - 1, "messages").stop)
        for start, stop in probe.policy.sight.runs
    ]
    sight = msgspec.structs.replace(probe.policy.sight, runs=runs)
    policy = msgspec.structs.replace(probe.policy, sight=sight)
    return msgspec.structs.replace(probe, policy=policy)


def fitted(ask: EngineRequest, max_model_len: int) -> EngineRequest:
    """Returns an expanded request that generates no more tokens than the model's length leaves.

    Raises MidstreamError("prompt_too_long").
    """
    tokens = len(ask.token_ids)
    room = max_model_len - tokens
    if room < 1 or (ask.sampling.max_tokens > room and not ask.fills):
        detail = (
            f"prompt {ask.request} has {tokens} tokens with its images, and the model's "
            f"limit is {max_model_len} in total"
        )
        raise MidstreamError(
            "prompt_too_long",
            detail,
            field="messages",
            hint="send fewer or smaller images, less text, or fewer max_tokens",
        )
    return dataclasses.replace(
        ask,
        sampling=msgspec.structs.replace(
            ask.sampling, max_tokens=min(ask.sampling.max_tokens, room)
        ),
    )


def align(written: Sequence[int], images: Sequence[ImageRef], rendered: Any) -> Expansion:
    """Return where each image is in vLLM's rendering of a prompt.

    Raises MidstreamError if anything but the placeholders was changed.
    """
    token_ids = list(rendered["prompt_token_ids"])
    places = rendered["mm_placeholders"].get("image", [])
    spans = []
    end_written = 0
    end = 0
    for ref, place in zip(images, places, strict=True):
        start = place.offset
        stop = place.offset + place.length
        if token_ids[end:start] != list(written[end_written : ref.start]):
            raise _changed()
        spans.append((ref, ImageSpan(digest=ref.digest, start=start, stop=stop)))
        end_written = ref.stop
        end = stop
    if token_ids[end:] != list(written[end_written:]):
        raise _changed()
    return Expansion(token_ids, spans)


def _changed() -> MidstreamError:
    return MidstreamError(
        "engine_failed",
        "the model's processor changed tokens around an image: positions would be wrong",
    )


def prompt_with_images(token_ids: list[int], files: Sequence[bytes]) -> TokensPrompt:
    """Return a prompt for vLLM to render. Raises MidstreamError for a file that is no image."""
    return TokensPrompt(
        prompt_token_ids=token_ids,
        multi_modal_data={"image": [_decoded(data, number) for number, data in enumerate(files)]},
    )


def _decoded(data: bytes, number: int) -> Image.Image:
    # a decoder may raise any exception for a bad file
    with Translated(
        Exception,
        lambda error: MidstreamError(
            "invalid_request",
            f"image {number} of the prompt cannot be decoded: {error}",
            field="messages",
        ),
    ):
        image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
        check_size(*image.size)  # a file may have several headers, of which the last counts
        image.load()  # raises for a truncated file
        # as vLLM's server: cameras write which side is up
        decoded: Image.Image = convert_image_mode(normalize_image(image), "RGB")
        return decoded


class Images(NamedTuple):
    """The images that a model takes."""

    number: int  # most images in one prompt
    placeholder: list[int]  # token ids of an image in a prompt as written
    refused: str = ""  # why it takes none


def images_of(config: VllmConfig, limit: int) -> Images:
    """Return how many images a model takes here, up to `limit` in one prompt, or why none.

    The model's own processor is tried with a small image.
    """
    refused = _refusal(config, limit)
    if not refused:
        try:
            return Images(limit, _placeholder(config.model_config))
        except Exception as error:  # a processor may raise any exception: it is the reason
            refused = (
                "the model's image processor does not run here: "
                f"{' '.join(str(error).split())[:300] or type(error).__name__}"
            )
    return Images(0, [], refused)


def _refusal(config: VllmConfig, limit: int) -> str:
    """Return why no images are taken, whatever the model's processor does."""
    model = config.model_config
    if not model.is_multimodal_model:
        return "the model takes text only"
    if not limit:
        return "the setting images_per_prompt is 0"
    if model.architectures[0] not in COMPARED:
        return (
            "rows of prompts with images were compared with transformers' for "
            f"{', '.join(sorted(COMPARED))} only"
        )
    if model.is_mm_prefix_lm:
        return (
            "tokens of an image attend to later ones in transformers' model, which is not "
            "proven of vLLM's"
        )
    untested = ", ".join(name for name, used in _untested(config).items() if used)
    return f"images are untested with {untested}" if untested else ""


def _untested(config: VllmConfig) -> dict[str, bool]:
    """Return feature → whether it is used, for features that were not tested with images."""
    return {
        "several ranks": config.parallel_config.world_size > 1,
        "the v2 runner": config.use_v2_model_runner,
        "compiled forwards": config.compilation_config.mode not in (None, CompilationMode.NONE),
        "draft tokens": config.speculative_config is not None,
        "LoRA adapters": config.lora_config is not None,
    }


def _placeholder(model: Any) -> list[int]:
    processor = MULTIMODAL_REGISTRY.create_processor(model)
    if not processor.info.allowed_mm_limits.get("image"):
        raise ValueError("it takes no images")
    text = processor.dummy_inputs.get_dummy_text({"image": 1})
    written = processor.info.get_tokenizer().encode(text, add_special_tokens=False)
    items = processor.info.parse_mm_data({"image": [Image.new("RGB", _PROBE_SIZE)]})
    rendered = processor.apply(ProcessorInputs(written, items), TimingContext(enabled=False))
    (place,) = rendered["mm_placeholders"]["image"]
    length = len(written) - (len(rendered["prompt_token_ids"]) - place.length)
    ref = ImageRef(digest="", start=place.offset, stop=place.offset + length)
    align(written, [ref], rendered)
    if not length:
        raise ValueError("its processor adds images without a placeholder")
    return list(written[ref.start : ref.stop])
