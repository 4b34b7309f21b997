"""Images of prompts: what is taken, what is refused by which field, and positions before and after
a prompt is expanded.
"""

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from model_kit import model
from PIL import ExifTags, Image
from refusal_kit import refuses
from vllm.multimodal.media.image import ImageMediaIO

from midstream.api.resolve.edits.steering import _check_global_positions
from midstream.api.resolve.positions.captures import Bounds, PromptFacts, resolve_captures
from midstream.api.resolve.prompts.images import check_number, placed
from midstream.api.resolve.prompts.request_parsing import parse_chat, plain_messages
from midstream.client.images import image_part, with_images
from midstream.schemas.artifacts.conditions import Condition, StoredPolicy
from midstream.schemas.artifacts.probes import ProbeContent, StoredProbe
from midstream.schemas.base.limits import MAX_IMAGE_PIXELS
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.jobs.jobs import Sampling
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.jobs.openai import ChatRequest
from midstream.schemas.prompts.images import ImageError, ImageRef, check_image, inside
from midstream.schemas.prompts.selectors import (
    PositionWindow,
    SelectorError,
    Span,
    resolve_positions,
)
from midstream.schemas.prompts.sight import Sight
from midstream.schemas.requests.specs import CaptureSpec, StoredCapture
from midstream.schemas.service.global_capture import parse, parse_positions
from midstream.workers.engine.prompts.images import align, expanded, fitted, prompt_with_images
from midstream.workers.engine.protocol import EngineRequest


def file_of(kind: str, width: int = 3, height: int = 2) -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (width, height)).save(made, kind)
    return made.getvalue()


PNG = file_of("PNG")
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def seeing(**fields: Any) -> ModelInfo:
    """A model that takes images."""
    return model(**{"images": 2, "image_placeholder": [500], **fields})


def chat(*parts: dict[str, Any]) -> ChatRequest:
    return from_json(
        to_json({"model": "m", "messages": [{"role": "user", "content": list(parts)}]}), ChatRequest
    )


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


# -- files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_images_are_known_by_their_header(kind: str) -> None:
    assert check_image(file_of(kind)) == kind


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a PNG or JPEG"),
        (file_of("GIF"), "not a PNG or JPEG"),
        (
            PNG[:16] + struct.pack(">II", 1 << 16, 1 << 16) + PNG[24:],
            f"1 to {MAX_IMAGE_PIXELS} pixels",
        ),
        (PNG[:16] + struct.pack(">II", 0, 5) + PNG[24:], "0 × 5 pixels"),
        (b"\xff\xd8\xff\xe0\x00\x04ab", "without a frame header"),
        (b"\xff\xd8" + b"\xff" * 64, "without a frame header"),
    ],
)
def test_other_files_are_refused_with_the_reason(data: bytes, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        check_image(data)


# -- requests
# --------------------------------------------------------------------------------------------------


def test_a_conversation_keeps_its_parts_and_hands_over_its_images() -> None:
    parsed = parse_chat(chat({"type": "text", "text": "look"}, picture(URL))).prompts[0]
    assert plain_messages(parsed.value) == [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image"}]}
    ]
    assert parsed.images == [PNG]
    text = parse_chat(chat({"type": "text", "text": "a"}, {"type": "text", "text": "b"})).prompts[0]
    assert plain_messages(text.value) == [{"role": "user", "content": "a\nb"}]


def test_every_image_has_one_placeholder() -> None:
    check_number([PNG, PNG], "messages", seeing())
    for ids, made, places in (
        ([1, 500, 2, 500], seeing(), [(1, 2), (3, 4)]),
        ([7, 7, 7, 7], seeing(image_placeholder=[7, 7]), [(0, 2), (2, 4)]),
    ):
        found = placed(ids, [PNG, PNG], "messages", made)
        assert [(ref.start, ref.stop) for ref in found] == places


def test_an_expanded_prompt_that_is_too_long_fails_and_one_that_fills_generates_less() -> None:
    sampling = Sampling(max_tokens=9)
    long = expanded(ask("all", sampling=sampling), MADE)
    assert fitted(long, 20).sampling.max_tokens == 9
    with refuses("has 11 tokens with its images", kind="prompt_too_long"):
        fitted(long, 19)
    fills = expanded(ask("all", sampling=sampling, fills=True), MADE)
    assert fitted(fills, 19).sampling.max_tokens == 8


# -- positions
# --------------------------------------------------------------------------------------------------

REFS = [ImageRef(digest="a", start=2, stop=3), ImageRef(digest="b", start=5, stop=6)]


@pytest.mark.parametrize(
    ("asked", "places"),
    [
        ("image", [2, 5]),
        (Span(image="all"), [2, 5]),
        (Span(image=0), [2]),
        (Span(image=-1), [5]),
        ([0, Span(image=1)], [0, 5]),
        (Span(image=1, start=3, stop=5), [inside(1, 3), inside(1, 4)]),
    ],
)
def test_images_are_named_by_their_placeholders(asked: Any, places: list[int]) -> None:
    assert resolve_positions(asked, 8, images=REFS) == places


@pytest.mark.parametrize(
    ("asked", "images", "words"),
    [
        ("image", [], "has no image"),
        (Span(image=2), REFS, "images 0 to 1"),
        ([Span(image=-3)], REFS, "out of range"),
    ],
)
def test_an_image_that_is_not_there_is_refused(
    asked: Any, images: list[ImageRef], words: str
) -> None:
    with pytest.raises(SelectorError, match=words):
        resolve_positions(asked, 8, images=images)


@pytest.mark.parametrize(
    "fields",
    [
        {"start": 1},
        {"text": "a"},
        {"start": 3, "stop": 3},
        {"start": -1, "stop": 2},
        {"occurrence": 1},
    ],
)
def test_a_span_of_an_image_has_both_ends_or_none(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of an image"):
        Span(image=0, **fields)


# -- on the worker
# --------------------------------------------------------------------------------------------------

WRITTEN = [10, 11, 500, 12, 13, 500, 14, 15]


class Range:
    def __init__(self, offset: int, length: int):
        self.offset = offset
        self.length = length


MADE = {
    "prompt_token_ids": [10, 11, 500, 500, 500, 12, 13, 7, 500, 14, 15],
    "mm_placeholders": {"image": [Range(2, 3), Range(7, 2)]},
}


def ask(positions: Any, **fields: Any) -> EngineRequest:
    captures = [StoredCapture(sites={"post_block": [0]}, positions=positions, tag="t")]
    return EngineRequest(
        **{
            "job": "j",
            "request": 0,
            "attempt": 1,
            "token_ids": WRITTEN,
            "sampling": Sampling(),
            "captures": captures,
            "images": REFS,
        }
        | fields
    )


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ([0, 1], [0, 1]),
        ([2], [2, 3, 4]),
        ([3, 5, 7], [5, 7, 8, 10]),
        ([inside(0, 1), inside(1, 1)], [3, 8]),
        ("last_prompt", "last_prompt"),
        (PositionWindow(start=2, stop=5), PositionWindow(start=2, stop=7)),
        (PositionWindow(start=6), PositionWindow(start=9)),
        (PositionWindow(start=8, stop=10), PositionWindow(start=11, stop=13)),
    ],
)
def test_places_as_written_become_positions_as_the_model_sees_them(written: Any, seen: Any) -> None:
    found = expanded(ask(written), MADE)
    assert found.captures[0].positions == seen
    assert [(span.digest, span.start, span.stop) for span in found.spans] == [
        ("a", 2, 5),
        ("b", 7, 9),
    ]
    assert found.token_ids == MADE["prompt_token_ids"]


def test_a_policy_that_reads_a_place_of_an_image_reads_all_of_its_tokens() -> None:
    policy = StoredPolicy(
        name="g",
        version=1,
        digest="d",
        condition=Condition(at_least=0.0),
        actions=[],
        mode="shadow",
        acts=False,
        sight=Sight(runs=[(1, 3), (5, 6)]),
    )
    content = ProbeContent(hook="post_block", layer=0, tensors=[], labels=["x"], thresholds=[None])
    probe = StoredProbe(name="policy:g", digest="d", content=content, policy=policy)
    (found,) = expanded(ask([0], probes=[probe]), MADE).probes
    assert found.policy is not None
    assert found.policy.sight == Sight(runs=[(1, 5), (7, 9)])


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_vllms_server_turns_them(mode: str, orientation: int) -> None:
    picture = Image.new(mode, (64, 48))
    picture.paste(Image.new(mode, (20, 10), "white"), (3, 2))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    written = io.BytesIO()
    picture.save(written, "PNG", exif=exif)
    (made,) = prompt_with_images([1], [written.getvalue()])["multi_modal_data"]["image"]
    served = ImageMediaIO().load_bytes(written.getvalue()).media
    assert made.size == served.size
    assert made.tobytes() == served.tobytes()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_last_of_several_headers_of_an_image_is_checked() -> None:
    data = file_of("PNG", 1, 1)
    end = 8 + 25  # of the first header
    fields = b"IHDR" + struct.pack(">II", 13_000, 13_000) + data[24:29]
    larger = struct.pack(">I", 13) + fields + struct.pack(">I", zlib.crc32(fields))
    check_image(data[:end] + larger + data[end:])  # the API knows the first alone
    with refuses("has 13000 × 13000 pixels", field="messages"):
        prompt_with_images([1], [data[:end] + larger + data[end:]])


@pytest.mark.parametrize("place", [1, 6, 10])
def test_a_processor_that_changes_text_is_found_out(place: int) -> None:
    changed = [*MADE["prompt_token_ids"]]
    changed[place] = 99
    with refuses("changed tokens around an image"):
        align(WRITTEN, REFS, MADE | {"prompt_token_ids": changed})


# -- the client
# --------------------------------------------------------------------------------------------------


def test_the_client_takes_paths_bytes_and_pillow(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    for image in (tmp_path / "a.png", str(tmp_path / "a.png"), PNG, Image.new("RGB", (3, 2))):
        assert image_part(image)["image_url"]["url"].startswith("data:image/png;base64,")
    (message,) = with_images([{"role": "user", "content": "look"}], [PNG])
    assert message["content"] == [picture(URL), {"type": "text", "text": "look"}]


def test_images_are_written_as_text_on_the_command_line_and_not_for_everyone() -> None:
    assert parse_positions("image") == "image"
    assert parse_positions("image:-1") == {"image": -1}
    with pytest.raises(ValueError, match="few prompts have one"):
        parse("post_block", "image")


# -- refusals
# --------------------------------------------------------------------------------------------------


def looked_at(url: str) -> Any:
    return parse_chat(chat({"type": "text", "text": "look"}, picture(url)))


URL_FIELD = "messages[0].content[1].image_url.url"


@pytest.mark.parametrize(
    ("call", "field", "words"),
    [
        (lambda: looked_at("https://example.org/a.png"), URL_FIELD, "not fetched"),
        (lambda: looked_at("data:image/gif;base64,R0lG"), URL_FIELD, "is not the image"),
        (lambda: looked_at("data:image/png;base64,%%%"), URL_FIELD, "not base64"),
        (lambda: looked_at("data:image/png;base64,R0lG"), URL_FIELD, "not a PNG or JPEG"),
        (
            lambda: check_number([PNG] * 3, "messages", seeing()),
            "messages",
            "at most 2 in one conversation",
        ),
        (
            lambda: check_number([PNG], "messages", seeing(images=0, images_refused="because")),
            "messages",
            "takes no images: because",
        ),
        *(
            (
                lambda ids=ids: placed(ids, [PNG], "messages", seeing()),
                "messages",
                "placeholders for 1 images",
            )
            for ids in ([1, 2], [500, 1, 500])
        ),
        (
            lambda: resolve_captures(
                CaptureSpec(positions="image"),
                Bounds(seeing(), [PromptFacts(8, images=REFS), PromptFacts(8)]),
            ),
            "capture.positions",
            "prompt 1: the prompt has no image",
        ),
        *(
            (
                lambda asked=asked: _check_global_positions(asked, "entries[0].positions"),
                f"entries[0].positions{'[0]' if isinstance(asked, list) else ''}",
                "images are not valid here",
            )
            for asked in ("image", Span(image=0), [Span(image=0)])
        ),
        (
            lambda: expanded(ask([inside(1, 2)]), MADE),
            "capture.positions",
            "image 1 has no token 2 (allowed: 0 to 1)",
        ),
        (
            lambda: prompt_with_images(WRITTEN, [PNG, file_of("PNG", 64, 64)[:60]]),
            "messages",
            "image 1 of the prompt cannot be decoded",
        ),
        *(
            (
                lambda wrong=wrong: with_images(
                    [{"role": "user", "content": "look"}], [PNG, wrong]
                ),
                "images[1]",
                words,
            )
            for wrong, words in (
                (Path("nowhere.png"), "cannot be read"),
                (b"x", "is not a PNG"),
                (5, "is a int"),
            )
        ),
    ],
)
def test_images_that_cannot_be_taken_are_refused_by_field(
    call: Any, field: str, words: str
) -> None:
    with refuses(words, field=field, kind="invalid_request"):
        call()
