"""What a large body costs the API: memory for its size, and how long it keeps the event loop."""

import asyncio
import time
import tracemalloc
from typing import Any

import hiredis
import pytest
from model_kit import model
from tokenizers import Tokenizer, models, pre_tokenizers
from wait_kit import warn_if_late

from midstream.api.resolve.admission.admission import admit
from midstream.api.resolve.prompts.request_parsing import parse_job
from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.broker.ledger.core import scripts
from midstream.schemas.base.records import from_json, now, to_json
from midstream.schemas.jobs.jobs import Job, JobRequest, Sampling, StoredPrompt
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.requests.specs import StoredCapture, StoredSteering
from midstream.schemas.settings.settings import Settings

SETTINGS = Settings(redis_url="redis://127.0.0.1:1/0")
#: The documented limits: bytes of memory for each of the body, and seconds for which nothing else
#: is answered.
MEMORY = 4
HOLD_S = 0.25
WORDS = [f"word{index}" for index in range(10_000)]
MODEL = model(vocab_size=len(WORDS) + 1, max_model_len=4096)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def codec() -> Codec:
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: index for index, word in enumerate(["<unk>", *WORDS])}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Codec(
        TokenizerBundle(
            tokenizer_json=tokenizer.to_str(),
            chat_template=TEMPLATE,
            special_tokens={},
            eos_token_ids=[],
        ),
        4096,
    )


def texts(count: int, words: int) -> list[str]:
    return [
        " ".join(WORDS[(number * 7 + place) % len(WORDS)] for place in range(words))
        for number in range(count)
    ]


def make_job(prompts: list[StoredPrompt], **more: Any) -> Job:
    return Job(
        id="job_x",
        kind="generate",
        model="m",
        prompts=prompts,
        sampling=Sampling(),
        created=now(),
        **more,
    )


async def longest_hold(found: list[float]) -> None:
    """The processor time of this thread from one turn of the event loop to the next: what a busy
    machine does not change.
    """
    while True:
        began = time.thread_time()
        await asyncio.sleep(0)
        found[0] = max(found[0], time.thread_time() - began)


async def accepted(body: bytes, codec: Codec) -> int:
    """Everything between the body and the connection to Redis; returns the bytes that are sent."""
    parsed = parse_job(from_json(body, JobRequest))
    await asyncio.sleep(0)
    return await sent((await admit(parsed, MODEL, codec, "job_x")).job)


async def sent(job: Job) -> int:
    arguments = scripts.submit(SETTINGS, job, await scripts.record(job), {}, (), None)
    return len(hiredis.pack_command(("EVALSHA", "sha", 0, *arguments)))


@pytest.mark.parametrize("kind", ["prompts", "conversations"])
def test_thousands_of_prompts_take_four_times_the_body_and_hold_nothing(kind: str) -> None:
    made: dict[str, Any] = {"prompts": texts(1500, 125)}
    if kind == "conversations":
        made = {"messages": [[{"role": "user", "content": text}] for text in texts(1500, 125)]}
    body = to_json({"model": "m", **made})
    tokenizer = codec()
    hold = [0.0]
    del made

    async def watched() -> None:
        beat = asyncio.create_task(longest_hold(hold))
        await accepted(body, tokenizer)
        beat.cancel()

    asyncio.run(watched())  # apart: tracing takes several times as long
    warn_if_late(hold[0], HOLD_S, "a large body is admitted in many turns of the event loop")
    tracemalloc.start()
    try:
        sent = asyncio.run(accepted(body, tokenizer))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sent > len(body) // 15, "the prompts and their token ids are sent"
    assert peak / len(body) < MEMORY


@pytest.mark.parametrize("entries", [0, 1])
@pytest.mark.parametrize("count", [1, 15, 16, 300, 70_000])
def test_a_large_job_is_compressed_and_is_the_same_when_it_is_read(
    count: int, entries: int
) -> None:
    prompts = [
        StoredPrompt(token_ids=list(range(5)), text=f"text {number}" if number % 2 else None)
        for number in range(count)
    ]
    prompts[0] = StoredPrompt(token_ids=list(range(scripts.PART)), text="ab")
    entry = StoredSteering(layers=[0], hook="post_block", family="add", tensors=[], positions="all")
    capture = StoredCapture(tag="c", sites={"post_block": [0]}, positions="all")
    edits: dict[str, Any] = {"steering": [[entry] * entries] * count, "captures": [[capture]]}
    own = edits if entries else {}
    job = make_job(prompts, metadata={"\xa7prompts": "\x91\x90"}, **own)
    raw = asyncio.run(scripts.record(job))
    assert scripts.recorded(raw) == job
    assert asyncio.run(scripts.record(job)) == raw, "a repeated submission is recognised by it"
