"""Does OpenAI's own client work against us, and does an answer with captures say only what is
settled?
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

import httpx2
import msgspec
import numpy as np
import openai
import pytest
import redis
from capture_kit import values
from edge import MODEL, WORDS, Api, Hand, refused
from wait_kit import wait_until

from midstream import returned_rows
from midstream.broker.ledger.jobs.ledger import Claim
from midstream.broker.ledger.named.steering import LedgerSteering
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import CaptureResults
from midstream.schemas.jobs.openai import ONLY
from midstream.schemas.jobs.receipts import Consumed
from midstream.schemas.requests.specs import CaptureSpec
from midstream.workers.runner.files.layouts import blob_of

HOOKS = ["pre_attn", "attn_out", "mlp_out", "post_block"]
CAPTURE = {"layers": [0, 3], "positions": "all_prompt"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WIDE = {"enum": ["x" * 70_000]}
DEEP: dict[str, Any] = {}
for _ in range(64):
    DEEP = {"items": DEEP}
COMPLETION = ("/v1/completions", {"model": MODEL, "prompt": "a"})
CHAT = (
    "/v1/chat/completions",
    {"model": MODEL, "messages": [{"role": "user", "content": "a"}]},
)
VECTOR = {"dtype": "float32", "shape": [8], "data": "AACAPwAAgD8AAIA/AACAPwAAgD8AAIA/AACAPwAAgD8="}


@pytest.fixture
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def test_a_completion_has_openais_shape(
    client: openai.OpenAI, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    asked = pool.submit(
        client.completions.create,
        model=MODEL,
        prompt="hello there",
        logprobs=2,
        max_tokens=3,
        seed=5,
        stop="b",
        user="me",
    )
    claim, answer = hand.answered(asked)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.id == claim.job.id
    assert answer.choices[0].text == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 2
    assert answer.usage.total_tokens == 5
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["hello"]
    assert logprobs.token_logprobs == [-0.5]
    assert logprobs.top_logprobs == [{"hello": -0.5, "there": -2.0}]
    assert "capture_results" not in answer.model_dump()
    sampling = claim.job.sampling
    assert sampling.temperature == 1.0
    assert sampling.max_tokens == 3
    assert sampling.seed == 5
    assert sampling.stop == ["b"]
    assert sampling.logprobs == 2


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hello", [[1, 2]]),
        (["hello", "a b"], [[1, 2], [1, 9, 10]]),
        ([4, 5], [[4, 5]]),
        ([[4, 5], [6]], [[4, 5], [6]]),
    ],
)
def test_every_form_of_prompt_is_taken(
    client: openai.OpenAI, hand: Hand, pool: ThreadPoolExecutor, prompt: Any, ids: list[list[int]]
) -> None:
    asked = pool.submit(client.completions.create, model=MODEL, prompt=prompt)
    texts = [f"answer {index}" for index in range(len(ids))]
    claim, answer = hand.answered(asked, texts)
    assert [stored.token_ids for stored in claim.job.prompts] == ids
    assert [choice.text for choice in answer.choices] == texts


def test_a_chat_has_openais_shape_and_the_models_template(
    client: openai.OpenAI, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    messages: Any = [
        {"role": "developer", "content": "a"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}],
        },
    ]
    asked = pool.submit(
        client.chat.completions.create,
        model=MODEL,
        messages=messages,
        logprobs=True,
        top_logprobs=1,
    )
    claim, answer = hand.answered(asked)
    assert claim.job.prompts[0].text == "<bos>system : a user : hello\nthere assistant :"
    assert claim.job.prompts[0].token_ids[:2] == [1, 6], "one BOS: the template's"
    assert claim.job.sampling.max_tokens == 32 - len(claim.job.prompts[0].token_ids), (
        "as far as the model's length allows"
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hello world"
    content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert content[0].token == "hello"
    assert content[0].bytes == list(b"hello")
    assert content[0].top_logprobs[0].logprob == -0.5


def test_the_models_are_listed_with_what_a_user_needs(client: openai.OpenAI, hand: Hand) -> None:
    (model,) = client.models.list().data
    facts = model.model_dump()
    assert model.id == MODEL
    assert facts["num_layers"] == 4
    assert facts["hidden_size"] == 8
    assert facts["hooks"] == HOOKS
    assert facts["workers"] == 1


def test_an_openai_field_that_is_not_served_is_refused_by_name(api: Api, hand: Hand) -> None:
    for name, (harmless, *_) in ONLY.items():
        path, body = COMPLETION if name in ("best_of", "suffix") else CHAT
        accepted = api.http.post(path, json={**body, name: harmless, "model": "nobody"})
        assert accepted.json()["field"] == "model", f"the harmless value of {name} is accepted"
        refused(api.http.post(path, json={**body, name: {"a": 7}}), 400, name)


#: What is wrong with a completion → the field that is named.
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [[1], [99]]}, "prompt[1][0]"),
    ({"max_tokens": 64}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"n": 129}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"n": 2, "seed": (1 << 63) - 2}, "seed"),
    ({"n": 128, "prompt": ["a"] * 33}, "n"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"logit_bias": {"99": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [99]}, "allowed_token_ids[0]"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"json": "7"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a\0"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": DEEP},
            }
        },
        "response_format.json_schema.schema",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": WIDE},
            }
        },
        "response_format.json_schema.schema",
    ),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"capture": {"layers": [9]}}, "capture.layers"),
    (
        {"steering": [{"layers": [0], "vector": {**VECTOR, "shape": [2, 4]}}]},
        "steering[0].vector.shape",
    ),
    ({"messages": []}, "messages"),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "critic", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": []}]},
        "messages[0].tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_call_id": "x"}]},
        "messages[0].tool_call_id",
    ),
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [{**TOOL, "function": {"name": ""}}]}, "tools[0].function.name"),
    (
        {"tools": [{**TOOL, "function": {"name": "f", "parameters": DEEP}}]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [{**TOOL, "function": {"name": "f", "parameters": 7}}]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": 7}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "x" * 5000}}, "chat_template_kwargs"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url.url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0].type",
    ),
    ({"max_completion_tokens": 64}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
]


@pytest.mark.parametrize(
    ("kind", "bad"),
    [(COMPLETION, BAD_COMPLETIONS), (CHAT, BAD_CHATS)],
    ids=["completions", "chats"],
)
def test_a_bad_request_names_the_field_in_its_own_shape(
    api: Api, hand: Hand, kind: tuple[str, dict[str, Any]], bad: list[tuple[dict[str, Any], str]]
) -> None:
    path, body = kind
    for changes, field in bad:
        refused(api.http.post(path, json={**body, **changes}), 400, field)
    assert hand.count_jobs() == 0


# field case 18, 19
def test_capture_wait_holds_the_answer_until_every_rank_and_prompt_has_reported(
    api: Api, pool: ThreadPoolExecutor
) -> None:
    with Hand(api.settings, ranks=[(0, 0), (1, 0), (0, 1), (1, 1)]) as hand:
        body = {
            "model": MODEL,
            "prompt": ["hello", "there"],
            "capture": CAPTURE,
            "capture_wait": True,
        }
        asked = pool.submit(api.http.post, "/v1/completions", json=body)
        claim = hand.claim_next()
        hand.store(claim)
        for request, rank in [(request, rank) for request in range(2) for rank in range(4)]:
            assert not asked.done(), f"answered before prompt {request}, rank {rank} had reported"
            # One rank of each stage writes; the others report that they wrote nothing.
            files = [hand.capture(claim, request, rank)] if rank in (0, 2) else []
            hand.receipt(claim, request, rank, files=files)
            time.sleep(0.1)
        answer = asked.result()
        results = answer.json()["capture_results"]
        assert answer.status_code == 200
        assert results["status"] == "ok"
        assert results["rows"] == 8
        assert sorted(
            (file["request"], file["pp"], file["sites"]["post_block"][0])
            for file in results["files"]
        ) == [
            (0, 0, 0),
            (0, 1, 3),
            (1, 0, 0),
            (1, 1, 3),
        ]
        for file in results["files"]:
            path = api.settings.capture_root / file["path"]
            assert path.stat().st_size == file["bytes"], "durable when it is said"
        determinism = answer.json()["determinism"]
        assert determinism["consistent"] is True
        assert [len(stage["ranks"]) for stage in determinism["stages"]] == [4, 4]


@pytest.mark.parametrize(
    "wish",
    [{"capture": CAPTURE, "capture_wait": True}, {"steering": [{"layers": 1, "vector": VECTOR}]}],
)
def test_a_held_answer_costs_one_round_trip_once_the_job_has_ended(
    api: Api, hand: Hand, pool: ThreadPoolExecutor, redis_url: str, wish: dict[str, Any]
) -> None:
    """State, result and whether Redis has logged them come together; stored outputs, with receipts
    missing, wake nobody.
    """
    body = {"model": MODEL, "prompt": "hello", **wish}
    asked = pool.submit(api.http.post, "/v1/completions", json=body)
    claim = hand.claim_next()
    with (
        redis.Redis.from_url(redis_url) as client,
        client.monitor() as monitor,
        ExitStack() as after,
    ):
        before = 0
        calls = 2
        while calls > before + 1:  # the acceptance has its own barrier; one call is ours
            time.sleep(0.3)
            before = calls
            calls = client.info("stats")["total_commands_processed"]
        # While its log is synced, Redis holds writes back: then the API has to ask again.
        after.callback(client.config_set, "appendfsync", "everysec")
        client.config_set("appendfsync", "no")
        wait_until(lambda: not client.info("persistence")["aof_pending_bio_fsync"])
        client.echo("quiet")
        hand.store(claim)
        time.sleep(0.3)
        client.echo("stored")
        hand.receipts(claim)
        assert asked.result().status_code == 200
        client.echo("the end")
        commands = takewhile(lambda each: "the end" not in each["command"], monitor.listen())
        whole = [each["command"] for each in commands if each["client_type"] != "lua"]
        seen = whole[whole.index("ECHO quiet") :]
    assert not [command for command in seen if command.startswith(("HMGET", "INFO"))], seen
    reads = [at for at, command in enumerate(seen) if f"ms:out:{claim.job.id} ms:t" in command]
    # a script that Redis does not know yet is called again
    loaded = sum(command.startswith("SCRIPT LOAD return {") for command in seen)
    assert len(reads) - loaded == 1, seen
    assert seen.index("ECHO stored") < reads[0]


def test_without_capture_wait_the_response_links_to_the_capture(
    api: Api, client: openai.OpenAI, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "hello"}
    asked = pool.submit(api.http.post, "/v1/completions", json=body | {"capture": CAPTURE})
    claim, answer = hand.answered(asked)
    stream = client.completions.create(**body, stream=True, extra_body={"capture": CAPTURE})
    hand.store(hand.claim_next())
    for facts in (answer.json(), list(stream)[-1].model_dump()):
        results = facts["capture_results"]
        assert results["status"] == "pending"
        assert results["files"] == []
        assert facts["determinism"] is None, "nobody has reported yet"
    url = answer.json()["capture_results"]["url"]
    assert url == f"/v1/captures/{answer.headers['x-midstream-job']}"
    hand.receipts(claim)
    assert api.http.get(url).json()["status"] == "ok"


def test_memory_captures_hold_the_response_and_return_in_it(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    capture = {
        "hooks": {"resid_pre": 3, "post_block": [0, 2]},
        "positions": "all_prompt",
        "consumers": ["memory"],
    }
    asked = pool.submit(
        api.http.post,
        "/v1/completions",
        json={"model": MODEL, "prompt": ["hello there", "a"], "capture": capture},
    )
    claim = hand.claim_next()
    hand.store(claim)
    for request in (0, 1):
        time.sleep(0.2)
        assert not asked.done(), "there is nothing to answer before the rows are there"
        hand.receipt(
            claim,
            request,
            consumed=[Consumed("memory", rows=rows_of(hand, claim, request))],
        )
    answer = asked.result().json()
    assert answer["capture_results"]["status"] == "ok"
    assert answer["capture_results"]["files"] == []
    rows = returned_rows(msgspec.convert(answer["capture_results"], CaptureResults))
    assert rows.requests() == [0, 1]
    assert rows.token_ids(0) == [1, 2, 3]
    assert rows.token_ids(1) == [1, 9]
    assert rows.layers(hook="post_block") == [0, 2]
    assert rows.layers(hook="pre_attn") == [3]
    np.testing.assert_array_equal(rows.array(2), values("post_block", 2, [0, 1, 2]))
    np.testing.assert_array_equal(rows.array(3, "pre_attn", 1), values("pre_attn", 3, [0, 1]))


def rows_of(hand: Hand, claim: Claim, request: int) -> bytes:
    """As the consumer `memory` returns them."""
    captured = hand.rows(claim, request)
    return b"".join(blob_of(captured, captured.sites).buffers)


def test_a_chats_span_is_found_in_the_templated_text(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "c b d"}],
        "capture": {"layers": 0, "positions": [{"text": "b d"}, {"text": "user"}, -1]},
        "steering": [
            {"layers": [1], "vector": VECTOR, "positions": {"text": "b", "occurrence": -1}}
        ],
    }
    asked = pool.submit(api.http.post, "/v1/chat/completions", json=body)
    claim, answer = hand.answered(asked, receipts=True)
    words = [WORDS[token] for token in claim.job.prompts[0].token_ids]
    assert words == ["<bos>", "user", ":", "c", "b", "d", "assistant", ":"]
    assert claim.job.captures[0][0].positions == [1, 4, 5, 7]
    assert claim.job.steering[0][0].positions == [4]
    assert answer.status_code == 200


def test_global_captures_neither_delay_nor_appear_in_responses(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    hand.serve(global_captures=[CaptureSpec(hooks={"pre_attn": "0-1"}, positions=[-1], tag="ops")])
    asked = pool.submit(api.http.post, "/v1/completions", json={"model": MODEL, "prompt": "hello"})
    claim, answer = hand.answered(asked)
    assert [
        (capture.tag, capture.sites, capture.positions) for capture in claim.job.captures[0]
    ] == [("ops", {"pre_attn": [0, 1]}, [1])]
    assert answer.status_code == 200
    assert "capture_results" not in answer.json()
    hand.receipts(claim)
    results = api.http.get(f"/v1/jobs/{claim.job.id}/result").json()["capture_results"]
    assert results["status"] == "ok"
    assert [file["tag"] for file in results["files"]] == ["ops"]


def test_a_steered_response_waits_for_receipts_of_all_ranks(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    body = {"model": MODEL, "prompt": "hello", "steering": [{"layers": [1], "vector": VECTOR}]}
    asked = pool.submit(api.http.post, "/v1/completions", json=body)
    claim = hand.claim_next()
    hand.store(claim)
    time.sleep(0.3)
    assert not asked.done()
    hand.receipt(claim, applied=4)
    answer = asked.result().json()
    assert answer["determinism"]["stages"][0]["ranks"][0]["applied"] == 4
    assert answer["capture_results"]["status"] == "not_requested"


# field case 39
def test_steering_that_failed_on_a_rank_never_succeeds(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    body = {"model": MODEL, "prompt": "hello", "steering": [{"layers": [1], "vector": VECTOR}]}
    asked = pool.submit(api.http.post, "/v1/completions", json=body)
    claim = hand.claim_next()
    hand.store(claim)
    hand.receipt(claim, status="error", message="no row was free")
    answer = asked.result()
    assert answer.status_code == 500
    assert answer.json()["type"] == "urn:midstream:intervention_failed"
    assert "choices" not in answer.json()


def test_rank_disagreement_uses_an_attempt_and_is_in_the_response(
    api: Api, pool: ThreadPoolExecutor
) -> None:
    # field case 29
    with Hand(api.settings, ranks=[(0, 0), (1, 0)]) as hand:
        body = {"model": MODEL, "prompt": "hello", "capture": CAPTURE, "capture_wait": True}

        def disagree() -> None:
            claim = hand.claim_next()
            hand.store(claim)
            hand.receipt(claim, rank=0)
            hand.receipt(claim, rank=1, checksum="0000000000000bad")
            hand.do(LedgerSteering(hand.ledger).clear_desync(hand.worker, "b1"))

        asked = pool.submit(api.http.post, "/v1/completions", json=body)
        disagree()
        again = hand.claim_next()
        hand.store(again, ["second try"])
        hand.receipts(again)
        answer = asked.result()
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == "second try"
        told = answer.json()["determinism"]
        assert told["consistent"]
        assert "0000000000000bad" in told["retried"][0]

        asked = pool.submit(api.http.post, "/v1/completions", json=body)
        disagree()
        disagree()
        answer = asked.result()
        assert answer.status_code == 500
        assert answer.json()["type"] == "urn:midstream:ranks_disagree"


def test_the_openai_client_does_not_retry_a_failed_job(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    with openai.OpenAI(
        base_url=f"{api.url}/v1", api_key="none", max_retries=3, timeout=60
    ) as client:
        asked = pool.submit(client.completions.create, model=MODEL, prompt="hello")
        hand.fail(hand.claim_next(), MidstreamError("engine_failed", "out of memory").problem())
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            asked.result()
    assert hand.count_jobs() == 1


def test_the_openai_client_raises_bad_input_with_the_field(
    client: openai.OpenAI, hand: Hand
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="a", n=2, temperature=0)
    assert refused.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="a")


# --- Streams
# --------------------------------------------------------------------------------------------------


def test_a_stream_sends_tokens_and_ends_with_the_finish_reason(
    client: openai.OpenAI, hand: Hand
) -> None:
    """The output has what no event brought."""
    stream = client.completions.create(model=MODEL, prompt="hello", stream=True)
    claim = hand.claim_next()
    assert claim.job.stream
    chunks = iter(stream)
    hand.say(claim, "hello")
    assert next(chunks).choices[0].text == "hello", "before the next is generated"
    hand.store(claim)
    rest = list(chunks)
    assert "".join(choice.text for chunk in rest for choice in chunk.choices) == " world"
    assert rest[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in rest)


def test_a_chat_stream_opens_with_the_role_and_counts_when_asked(
    client: openai.OpenAI, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    hand.store(hand.say_next("hello", " world"))
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        == "hello world"
    )
    assert [
        choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason
    ] == ["stop"]
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


def test_a_stream_of_several_prompts_keeps_them_apart(client: openai.OpenAI, hand: Hand) -> None:
    stream = client.completions.create(model=MODEL, prompt=["a", "b"], stream=True)
    claim = hand.claim_next()
    for index, word in [(0, "x"), (1, "y"), (1, "Y"), (0, "X")]:
        hand.say(claim, word, index)
    hand.store(claim, ["xX", "yY"])
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "xX", 1: "yY"}


# field case 19
def test_the_last_chunk_of_a_stream_waits_for_the_captures_and_carries_them(
    client: openai.OpenAI, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    extra = {"capture": CAPTURE, "capture_wait": True}
    stream = client.completions.create(model=MODEL, prompt="hello", stream=True, extra_body=extra)
    claim = hand.say_next("hello world")
    chunks = iter(stream)
    assert next(chunks).choices[0].text == "hello world"
    hand.store(claim)
    rest = pool.submit(list, chunks)
    time.sleep(0.4)
    assert not rest.done(), "the finish is said only when the captures are durable"
    hand.receipts(claim)
    facts = rest.result()[-1].model_dump()
    assert facts["choices"][0]["finish_reason"] == "stop"
    assert facts["capture_results"]["status"] == "ok"
    assert facts["capture_results"]["rows"] == 4
    assert facts["determinism"]["consistent"] is True


# field case 39
def test_a_failure_mid_stream_is_an_error_event(client: openai.OpenAI, hand: Hand) -> None:
    stream = client.completions.create(model=MODEL, prompt="hello", stream=True)
    claim = hand.say_next("hello")
    chunks = iter(stream)
    next(chunks)
    hand.fail(claim, MidstreamError("engine_failed", "the engine died").problem())
    with pytest.raises(openai.APIError, match="the engine died"):
        list(chunks)


def test_a_capture_failure_after_the_last_token_is_an_error_event(
    client: openai.OpenAI, hand: Hand
) -> None:
    extra = {"capture": CAPTURE, "capture_wait": True}
    stream = client.completions.create(model=MODEL, prompt="hello", stream=True, extra_body=extra)
    claim = hand.say_next("hello world")
    hand.store(claim)
    hand.receipt(claim, status="error", message="disk full")
    with pytest.raises(openai.APIError, match="disk full"):
        list(stream)


def test_a_stream_resumes_when_another_worker_retries_the_job(
    client: openai.OpenAI, hand: Hand
) -> None:
    stream = client.completions.create(model=MODEL, prompt="hello", stream=True)
    first = hand.say_next("hello")
    hand.do(hand.ledger.release(first.job.id, first.attempt))
    second = hand.claim(first.job.id)
    for word in ("hel", "lo wor", "ld"):
        hand.say(second, word)
    hand.store(second)
    assert "".join(choice.text for chunk in stream for choice in chunk.choices) == "hello world"


# --- Clients that leave, and limits
# ----------------------------------------------------------------------------------


# field case 38
# field case 38
@pytest.mark.parametrize("stream", [False, True])
def test_a_job_completes_after_its_client_disconnects(api: Api, hand: Hand, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "hello", "capture": CAPTURE, "capture_wait": True}
    url = f"{api.url}/v1/completions"
    key = {"Idempotency-Key": "once"}
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(
            url, json=body | {"stream": stream}, headers=key, timeout=httpx2.Timeout(60, read=0.5)
        )
    claim = hand.claim_next()
    hand.store(claim)
    hand.receipts(claim)
    result = api.http.get(f"/v1/jobs/{claim.job.id}/result").json()
    assert result["state"] == "succeeded"
    assert result["capture_results"]["status"] == "ok"
    assert result["outputs"][0]["text"] == "hello world"
    again = api.http.post(url, json=body | {"stream": stream}, headers=key)
    assert "hello world" in again.text, "the key returns the job whose answer was lost"
    assert hand.count_jobs() == 1
