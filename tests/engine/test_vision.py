"""Rows of models that take images are those of transformers' model, with text alone and with
images.
"""

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
import torch
from fidelity import ALL, Truth, capture, judge, options_of
from fidelity_page import Way
from host import Host, capture_of, prompt_of
from nursery import Nursery
from PIL import Image
from reference import Edit, Reference
from refusal_kit import refuses
from stack import Stack
from tiny_vision import CHECKPOINTS, PLACES, PROCESSORS, checkpoint, with_images
from transformers import AutoProcessor

from midstream.client import Client
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.images import ImageRef, digest_of, inside
from midstream.workers.engine.no_torchvision import stand_in

pytestmark = pytest.mark.long

EAGER = Way("v1", "eager", "float32")
#: Each of another kind: one that rotates by three positions, one whose language model has no head
#: of its own, one with sandwich norms.
FEW = ("qwen2-vl", "smolvlm")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: checkpoint(name, folder / name))


def picture(seed: int, width: int, height: int) -> tuple[Image.Image, bytes]:
    """Random pixels, and their PNG file."""
    image = Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    )
    file = io.BytesIO()
    image.save(file, "PNG")
    return image, file.getvalue()


PICTURES = [picture(1, 60, 40), picture(2, 30, 90)]


def prompt_with(
    placeholder: list[int],
    pictures: list[tuple[Image.Image, bytes]] = PICTURES,
    around: tuple[list[int], list[int]] = ([], []),
) -> tuple[list[int], list[ImageRef]]:
    """A prompt as written: words, and an image behind each five of them; `around`: tokens before
    and after each image.
    """
    ids: list[int] = []
    images = []
    for number, (_, data) in enumerate(pictures):
        ids += [word % 400 for word in prompt_of(5, seed=number)] + around[0]
        images.append(
            ImageRef(digest=digest_of(data), start=len(ids), stop=len(ids) + len(placeholder))
        )
        ids += placeholder + around[1]
    return ids + prompt_of(4, seed=9), images


def job_with(
    host: Host,
    ids: list[int],
    images: list[ImageRef],
    pictures: list[tuple[Image.Image, bytes]] = PICTURES,
    **asked: Any,
) -> Job:
    host.files |= {digest_of(data): data for _, data in pictures}
    job = host.job(ids, max_tokens=3, **asked)
    return msgspec.structs.replace(
        job, prompts=[msgspec.structs.replace(job.prompts[0], images=images)]
    )


def seen_by_transformers(
    path: Path, pictures: list[tuple[Image.Image, bytes]] = PICTURES, place: str = "<image>"
) -> tuple[int, dict[str, Any]]:
    """How many tokens of images transformers' own processor gives, and what the model gets beside
    the tokens.
    """
    stand_in()
    made = AutoProcessor.from_pretrained(path)(
        text=[f"w5 {place} " * len(pictures)],
        images=[[image for image, _ in pictures]],
        return_tensors="pt",
    )
    beside = {
        name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")
    }
    return made["input_ids"][0].tolist().count(500), beside


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "llava" else (pytest.mark.matrix,))
        for name in PROCESSORS
    ],
)
def test_prompts_with_images_give_transformers_rows_plain_and_edited(
    name: str, nursery: Nursery, tmp_path: Path
) -> None:
    """Edits are at the places as written: an image's is the place of its placeholder, and one is at
    a single token of an image.
    """
    path = with_images(name, tmp_path / "checkpoint")
    with closing(nursery.host(tmp_path / "engine", path, **options_of(EAGER))) as host:
        hooks = tuple(host.info["hooks"])
        placeholder = host.info["image_placeholder"]
        assert host.info["images"], host.info["images_refused"]
        ids, images = prompt_with(
            placeholder, around=([502], [503]) if name.startswith("qwen") else ([], [])
        )
        everything = capture_of([], "all", sites={hook: ALL for hook in hooks})
        second = capture_of([1], [images[1].start], tag="second")
        added, put = 4 * np.random.default_rng(5).normal(size=(2, 64)).astype(np.float32)
        written = [
            Edit(1, added, [2, images[0].start], "post_block"),
            Edit(2, put, [len(ids) - 1], "pre_attn", "replace"),
        ]
        one_token = msgspec.structs.replace(
            host.steering(Edit(0, put, [0], "mlp_out"))[0], positions=[inside(1, 2)]
        )
        plain = job_with(host, ids, images, capture=[everything, second])
        edited = job_with(
            host, ids, images, capture=everything, steering=[*host.steering(*written), one_token]
        )
        outputs = host.run(plain, edited)
        readers = {job.id: host.capture(job) for job in (plain, edited)}
        spans = readers[plain.id].images()
        of_second = host.capture(plain, 1).positions()
    tokens, beside = seen_by_transformers(path, place=PLACES.get(name, "<image>"))
    ids_seen = readers[plain.id].token_ids()
    prompt_tokens = outputs[plain.id][0].prompt_tokens
    assert ids_seen[:prompt_tokens].count(500) == tokens
    assert [span.digest for span in spans] == [digest_of(data) for _, data in PICTURES]
    assert of_second == list(range(spans[1].start, spans[1].stop))
    assert ids_seen[spans[1].stop : prompt_tokens] == ids[images[1].stop :]
    first = list(range(spans[0].start, spans[0].stop))
    last = prompt_tokens - 1
    edits = [
        Edit(1, added, [2, *first], "post_block"),
        Edit(2, put, [last], "pre_attn", "replace"),
        Edit(0, put, [spans[1].start + 2], "mlp_out"),
    ]
    truth = Reference(path)
    beyond = {}
    for job, these in ((plain, []), (edited, edits)):
        if "mm_token_type_ids" in beside:
            beside["mm_token_type_ids"] = torch.tensor(
                [[int(token == 500) for token in readers[job.id].token_ids()]]
            )
        wanted = truth.rows(readers[job.id].token_ids(), these, images=beside)
        for (hook, layer), right in wanted.items():
            error = np.linalg.norm(
                readers[job.id].array(layer, hook) - right, axis=-1
            ) / np.linalg.norm(right, axis=-1)
            beyond |= (
                {(job.id, hook, layer): float(error.max())} if error.max() > EAGER.tolerance else {}
            )
    assert beyond == {}


# field case 15
def test_prompts_of_equal_tokens_and_other_images_share_no_rows(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Neither cached blocks nor kept rows; the same image does."""
    path = with_images("llava", tmp_path / "checkpoint")
    with closing(
        nursery.host(
            tmp_path / "engine",
            path,
            **options_of(EAGER) | {"engine.enable_prefix_caching": True, "engine.block_size": 32},
        )
    ) as host:
        pairs = [PICTURES, [PICTURES[0], picture(3, 30, 90)], PICTURES]
        written = []
        images = []
        for pictures in pairs:
            ids, refs = prompt_with(host.info["image_placeholder"], pictures)
            written.append(ids + prompt_of(40, seed=4))
            images.append(refs)
        jobs = [
            job_with(host, ids, refs, pictures, capture=capture_of([3], "all_prompt"))
            for ids, refs, pictures in zip(written, images, pairs, strict=True)
        ]
        outputs = [host.run(job)[job.id][0] for job in jobs]
        rows = [host.capture(job).array(3) for job in jobs]
    assert written[0] == written[1] == written[2]
    assert [output.cached_tokens for output in outputs] == [0, 0, 32]
    for number, pictures in enumerate(pairs):
        _, beside = seen_by_transformers(path, pictures)
        expanded = host.capture(jobs[number]).token_ids()
        right = Reference(path).rows(expanded, images=beside)["post_block", 3]
        error = np.linalg.norm(rows[number] - right, axis=-1) / np.linalg.norm(right, axis=-1)
        assert error.max() <= EAGER.tolerance, number
    assert np.abs(rows[0] - rows[1]).max() > 1e-2


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FEW else (pytest.mark.matrix,))
        for name in CHECKPOINTS
    ],
)
def test_text_alone_gives_transformers_rows_plain_and_edited(
    name: str, nursery: Nursery, checkpoints, tmp_path: Path
) -> None:
    with closing(nursery.host(tmp_path / "engine", checkpoints(name), **options_of(EAGER))) as host:
        outcomes = capture(host, tuple(host.info["hooks"]))
    figures = judge([outcomes], Truth(checkpoints(name), "float32"), "float32")
    assert {
        hook: str(figure) for hook, figure in figures.items() if figure.worst > EAGER.tolerance
    } == {}


# --- Images through chat, over HTTP: an engine, and the whole stack around it ---------------------


CHAT = [{"role": "user", "content": "w40 w50 w60"}]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_images("llava", tmp_path_factory.mktemp("llava") / "llava")


@pytest.fixture(scope="module")
def service(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = {
        "engine": "vllm",
        "model": str(llava),
        "engine.dtype": "float32",
        "engine.max_model_len": 128,
        "kv_cache_gib": 0.125,
    }
    slow = {"lease_s": 15.0, "tuning.visibility_timeout_s": 30}
    with Stack(
        tmp_path_factory.mktemp("service"), api=True, start_timeout_s=400, **options, **slow
    ) as stack:
        yield stack


@pytest.mark.matrix
def test_chat_with_images_captures_and_steers_the_tokens_that_are_named(
    service: Stack, llava: Path
) -> None:
    """As many tokens as transformers' processor gives; what is steered is one image, so the words
    before it keep their rows.
    """
    files = [data for _, data in PICTURES]
    vector = np.full(64, 3.0, dtype=np.float32)
    with Client(service.url) as client:
        wanted = {"layers": [3], "positions": "all_prompt"}
        plain = client.chat(
            "llava", CHAT, images=files, max_tokens=2, capture=wanted, capture_wait=True
        )
        steered = client.chat(
            "llava",
            CHAT,
            images=files,
            max_tokens=2,
            capture=wanted,
            capture_wait=True,
            steering={"layers": [1], "positions": {"image": 1}, "vector": vector},
        )
        only = client.chat(
            "llava",
            CHAT,
            images=files,
            max_tokens=2,
            capture={"layers": [3], "positions": "image"},
            capture_wait=True,
        )
        readers = [client.capture(answer.job) for answer in (plain, steered, only)]
        manifest = httpx2.get(f"{service.url}/v1/captures/{plain.job}", timeout=30).json()
    tokens, _ = seen_by_transformers(llava)
    first, second = readers[0].images()
    assert [first.digest, second.digest] == list(map(digest_of, files))
    assert manifest["files"][0]["images"] == [
        {"digest": span.digest, "start": span.start, "stop": span.stop} for span in (first, second)
    ]
    named = [*range(first.start, first.stop), *range(second.start, second.stop)]
    assert readers[2].positions() == named
    assert (
        len(named)
        == tokens
        == plain.raw["usage"]["prompt_tokens"] - len(["w3", *CHAT[0]["content"].split(), "w4"])
    )
    rows = readers[0].array(3)
    moved = readers[1].array(3)
    assert np.array_equal(rows[: second.start], moved[: second.start])
    assert (np.abs(rows[second.start :] - moved[second.start :]).max(axis=1) > 0.1).all()
    assert np.array_equal(readers[2].array(3), rows[named])


@pytest.mark.matrix
def test_what_only_the_worker_can_know_fails_the_job_with_a_typed_error(service: Stack) -> None:
    """A file that ends early, a token that the image has not, and a prompt that its images make too
    long.
    """
    _, whole = PICTURES[0]
    with Client(service.url) as client:
        for images, capture, kind, words in (
            ([whole[: len(whole) // 2]], None, "invalid_request", "cannot be decoded"),
            (
                [whole],
                {"layers": [0], "positions": {"image": 0, "start": 3, "stop": 9}},
                "invalid_request",
                "has no token 4",
            ),
        ):
            with refuses(match=words, kind=kind):
                client.chat(
                    "llava",
                    CHAT,
                    images=images,
                    max_tokens=1,
                    **({} if capture is None else {"capture": capture}),
                )
        with refuses(match="with its images", kind="prompt_too_long"):
            client.chat(
                "llava", [{"role": "user", "content": "w40 " * 122}], images=[whole], max_tokens=1
            )
        assert (
            client.chat("llava", CHAT, images=[whole], max_tokens=None).raw["usage"]["total_tokens"]
            <= 128
        )
        job = {"model": "llava", "max_tokens": 1, "capture": {"layers": [0], "positions": "image"}}
        url = "data:image/png;base64," + base64.b64encode(whole).decode()
        parts = [{"type": "text", "text": "w9"}, {"type": "image_url", "image_url": {"url": url}}]
        result = client.run(**job, messages=[[{"role": "user", "content": parts}]])
        assert len(client.capture(result.id).positions()) == 4
