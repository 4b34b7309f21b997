"""Images through chat, over HTTP and on the real engine: rows of named images, the manifest's
spans, and what is refused.
"""

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
from refusal_kit import refuses
from stack import Stack
from test_vision import PICTURES, seen_by_transformers
from tiny_vision import with_images

from midstream.client import Client
from midstream.schemas.prompts.images import digest_of

pytestmark = pytest.mark.matrix  # two minutes: an engine, and the whole stack around it

CHAT = [{"role": "user", "content": "w40 w50 w60"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_images("llava", tmp_path_factory.mktemp("checkpoint") / "llava")


@pytest.fixture(scope="module")
def service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = {
        "engine": "vllm",
        "model": str(checkpoint),
        "engine.dtype": "float32",
        "engine.max_model_len": 128,
        "kv_cache_gib": 0.125,
    }
    slow = {"lease_s": 15.0, "tuning.visibility_timeout_s": 30}
    with Stack(
        tmp_path_factory.mktemp("service"), api=True, start_timeout_s=400, **options, **slow
    ) as stack:
        yield stack


def test_chat_with_images_captures_and_steers_the_tokens_that_are_named(
    service: Stack, checkpoint: Path
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
    tokens, _ = seen_by_transformers(checkpoint)
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
    rows, moved = readers[0].array(3), readers[1].array(3)
    assert np.array_equal(rows[: second.start], moved[: second.start])
    assert (np.abs(rows[second.start :] - moved[second.start :]).max(axis=1) > 0.1).all()
    assert np.array_equal(readers[2].array(3), rows[named])


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
