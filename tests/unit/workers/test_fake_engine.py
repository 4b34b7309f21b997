"""Is the fake engine a fair stand-in?

Deterministic, one delta after the other, and honest about its tokenizer.
"""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from midstream_fake_engine import ranks
from midstream_fake_engine.engine import FakeEngine
from midstream_fake_engine.model import HIDDEN_SIZE, residual_rows
from midstream_fake_engine.rank import FakeFaults, FakeRank
from midstream_fake_engine.turnstile import Turnstile
from tokenizers import Tokenizer

from midstream.client import CaptureReader
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.settings import Settings
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.jobs.jobs import Job, Output, Sampling, StoredPrompt
from midstream.schemas.jobs.models import encode_bundle
from midstream.schemas.prompts.selectors import HOOKS, Hook
from midstream.schemas.requests.source_runs import ZEROS, RunFiles, RunRow, row_name
from midstream.schemas.requests.specs import RankSpec, StoredCapture, StoredSteering
from midstream.schemas.requests.steering import GlobalSteering, SteeringTemplate
from midstream.workers.engine.protocol import Progress
from midstream.workers.engine.requests import prompt_request
from midstream.workers.engines import make_engine


def settings(tmp_path: Path, **changed: object) -> Settings:
    values = {
        "data_dir": str(tmp_path),
        "engine": "fake",
        "model": "fake-model",
        "worker_id": "w1",
        "relay_url": "tcp://127.0.0.1:9",
    }
    return Settings(**(values | changed))  # type: ignore[arg-type]


def job(
    prompt: str = "abc",
    *,
    stream: bool = False,
    steering: list[StoredSteering] | None = None,
    captures: list[StoredCapture] | None = None,
    **sampling: object,
) -> Job:
    return Job(
        id="job_x",
        kind="generate",
        model="fake-model",
        prompts=[StoredPrompt(token_ids=list(prompt.encode()))],
        created=0.0,
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
        stream=stream,
        steering=[steering] if steering else [],
        captures=[captures] if captures else [],
    )


VECTOR = from_numpy(np.ones(8, dtype=np.float32))
STEERING = StoredSteering(
    layers=[1], hook="post_block", positions="all", family="add", tensors=[content_hash(VECTOR)]
)
NOTHING = GlobalSteering()
EVERYONE = GlobalSteering(
    version=1,
    entries=[
        SteeringTemplate(
            layers=[1],
            hook="post_block",
            positions="all",
            family="add",
            tensors=[content_hash(VECTOR)],
        )
    ],
)


async def fetch(name: str) -> Tensor:
    assert name == content_hash(VECTOR)
    return VECTOR


@pytest.fixture(autouse=True)
def _no_relay_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "FLUSH_S", 0.0)


def generate(engine: FakeEngine, wanted: Job, everyone: GlobalSteering = NOTHING) -> list[Progress]:
    async def run() -> list[Progress]:
        await engine.start()
        await engine.hold_vectors([content_hash(VECTOR)], fetch)
        try:
            return [
                progress
                async for progress in engine.generate(prompt_request(wanted, 0, 1), everyone)
            ]
        finally:
            await engine.shutdown()

    return asyncio.run(run())


def captured(tmp_path: Path, *wanted: StoredCapture, **changed: object) -> list[CaptureReader]:
    """What the fake ranks wrote of the prompt `abc` and five generated tokens, for each capture."""
    generate(FakeEngine(settings(tmp_path, **changed)), job(max_tokens=5, captures=list(wanted)))
    return [CaptureReader(tmp_path / "captures", "job_x", tag=capture.tag) for capture in wanted]


def test_manifests_say_of_how_many_prompts_there_are_rows_under_their_tag(tmp_path: Path) -> None:
    mine, everyones = (
        StoredCapture(sites={"post_block": [0]}, positions="all_prompt", tag=tag)
        for tag in ("mine", "ops")
    )
    wanted = job(max_tokens=2, captures=[mine, everyones])
    prompts, captures = wanted.prompts * 3, [[mine, everyones], [mine], [mine]]
    generate(
        FakeEngine(settings(tmp_path)),
        msgspec.structs.replace(wanted, prompts=prompts, captures=captures),
    )
    readers = [
        CaptureReader(tmp_path / "captures", "job_x", tag=tag, partial=True)
        for tag in ("mine", "ops")
    ]
    assert [(reader.manifest().requests, len(reader.gaps())) for reader in readers] == [
        (3, 1),
        (1, 0),
    ]


def test_fake_captures_encode_hook_layer_and_position(tmp_path: Path) -> None:
    sites: dict[Hook, list[int]] = {"pre_attn": [0, 3], "mlp_in": [2], "post_block": [0, 1, 2, 3]}
    capture = StoredCapture(sites=sites, positions="all", tag="mine")
    (reader,) = captured(tmp_path, capture, pipeline_parallel_size=2, tensor_parallel_size=2)
    assert reader.positions() == list(range(7))  # the last generated token is never fed back
    assert reader.token_ids()[:3] == list(b"abc")
    for hook, layers in sites.items():
        assert reader.layers(hook=hook) == layers
        for layer in layers:
            rows = residual_rows(layer, np.arange(7), np.array(reader.token_ids()), hook)
            np.testing.assert_array_equal(reader.array(layer, hook), rows)


def test_several_captures_of_a_prompt_are_written_each_in_its_form(tmp_path: Path) -> None:
    last, sparse = captured(
        tmp_path,
        StoredCapture(
            sites={"post_block": [1]},
            positions="last_prompt",
            tag="last",
            dtype="bfloat16",
            at="after",
            layout="per_file",
        ),
        StoredCapture(
            sites={"pre_attn": [1]},
            positions="all_generated",
            tag="sparse",
            every_n=2,
            dtype="float16",
        ),
    )
    assert (last.positions(), last.dtype(), last.manifest().at) == ([2], "bfloat16", "after")
    assert (sparse.positions(), sparse.dtype(), sparse.manifest().at) == (
        [3, 5],
        "float16",
        "before",
    )
    rows = residual_rows(1, np.array([3, 5]), np.array(sparse.token_ids()), "pre_attn")
    np.testing.assert_allclose(sparse.array(1), rows, rtol=1e-3)


def test_model_info_lists_hooks_and_global_captures(tmp_path: Path) -> None:
    info = FakeEngine(
        settings(tmp_path, global_capture="post_block:all;pre_attn:0-1", global_capture_tag="all")
    ).info
    assert info.hooks == list(HOOKS)
    assert info.consumers == ["filesystem", "memory", "logging"]
    (always,) = info.global_captures
    assert (always.tag, always.wanted) == ("all", {"post_block": "all", "pre_attn": "0-1"})


def output(tmp_path: Path, wanted: Job, everyone: GlobalSteering = NOTHING) -> Output:
    finished = generate(FakeEngine(settings(tmp_path)), wanted, everyone)[-1].finished
    assert finished is not None
    return finished


def test_the_same_prompt_gives_the_same_text(tmp_path: Path) -> None:
    assert output(tmp_path, job()) == output(tmp_path, job())


def test_request_and_global_steering_change_fake_text_alike(tmp_path: Path) -> None:
    steered = output(tmp_path, job(steering=[STEERING])).text
    assert steered != output(tmp_path, job()).text
    assert steered == output(tmp_path, job(), EVERYONE).text


def test_deltas_of_a_stream_add_up_to_the_output(tmp_path: Path) -> None:
    progress = generate(FakeEngine(settings(tmp_path)), job(stream=True, max_tokens=6))
    finished = progress[-1].finished
    assert finished is not None
    assert len(progress) == 6
    assert "".join(part.text for part in progress) == finished.text
    assert [token for part in progress for token in part.token_ids] == finished.token_ids


def test_a_stop_string_ends_the_text_before_it(tmp_path: Path) -> None:
    full = output(tmp_path, job(max_tokens=12)).text
    progress = generate(
        FakeEngine(settings(tmp_path)), job(stream=True, max_tokens=12, stop=[full[4:6]])
    )
    finished = progress[-1].finished
    assert finished is not None
    assert finished.finish_reason == "stop"
    assert finished.text == full[: full.index(full[4:6])] == "".join(part.text for part in progress)


def test_the_published_tokenizer_writes_what_the_engine_reads(tmp_path: Path) -> None:
    engine = FakeEngine(settings(tmp_path))
    tokenizer = Tokenizer.from_str(engine.tokenizer.tokenizer_json)
    assert tokenizer.decode(tokenizer.encode("héllo wörld").ids) == "héllo wörld"
    assert engine.info.tokenizer == encode_bundle(engine.tokenizer)[0]
    assert engine.info.vocab_size == tokenizer.get_vocab_size()


def test_a_dead_engine_says_why_and_generates_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(settings(tmp_path, fault="engine_dies:tokens=3"))

    async def run() -> str:
        await engine.start()
        try:
            with pytest.raises(MidstreamError, match="died after 3 tokens"):
                async for _ in engine.generate(prompt_request(job(max_tokens=5), 0, 1), NOTHING):
                    pass
            with pytest.raises(MidstreamError, match="died"):
                await anext(engine.generate(prompt_request(job(), 0, 1), NOTHING))
            return await asyncio.wait_for(engine.failed(), 1)
        finally:
            await engine.shutdown()

    assert "died after 3 tokens" in asyncio.run(run())


def test_the_setting_names_the_engine(tmp_path: Path) -> None:
    assert isinstance(make_engine(settings(tmp_path)), FakeEngine)


def test_faults_are_named_with_their_arguments_and_strike_as_often_as_they_say() -> None:
    faults = FakeFaults("hold:rank=1;engine_dies:tokens=3;commit:rank=0,times=1")
    assert (faults.rank("hold"), faults.get("engine_dies"), faults.get("silent")) == (
        1,
        {"tokens": "3"},
        None,
    )
    assert [faults.strikes("hold", rank) for rank in (0, 1, 1)] == [False, True, True]
    assert [faults.strikes("commit", rank) for rank in (1, 0, 0)] == [False, True, False]


# field case 31
def test_a_fake_rank_refuses_a_request_whose_row_of_a_run_it_has_not(tmp_path: Path) -> None:
    faults = FakeFaults("")
    rank = FakeRank(0, 0, 0, settings(tmp_path), faults)
    run = RunFiles(
        key="job_s.0.t",
        sites={"post_block": [1, 2]},
        positions=[0, 1, 4],
        hidden_size=HIDDEN_SIZE,
        bytes=96,
        files=[],
    )

    def begins(
        layer: int, position: int | None, mean: tuple[int, ...] = (), key: str = run.key
    ) -> tuple[bool, str]:
        tensors = [row_name(RunRow(key, "post_block", layer, position, mean)), ZEROS]
        patch = StoredSteering(
            layers=[1],
            hook="post_block",
            positions=[2],
            family="replace_masked",
            tensors=tensors,
            numbers=[1.0],
        )
        spec = RankSpec(
            version="v", job="job_x", request=0, attempt=1, prompt_tokens=6, steering=[patch]
        )
        answer = rank.begin(spec)
        rank.end(spec)
        return answer

    assert begins(1, 4) == (False, "source run job_s.0.t is not on this rank")
    faults.switch("put_run:times=1;drop_runs:times=1")
    assert rank.midstream_put_run(msgspec.to_builtins(run)) == (False, "injected fault")
    assert rank.midstream_put_run(msgspec.to_builtins(run)) == (True, "")
    assert [begins(1, 4), begins(2, None), begins(1, None, (0, 1))] == [(True, "")] * 3
    assert begins(3, 4) == (False, "source run job_s.0.t has no rows of post_block of layer 3")
    assert begins(1, 3) == (False, "source run job_s.0.t has no row at position 3")
    assert begins(1, None, (0, 3)) == (False, "source run job_s.0.t has no row at position 3")
    assert begins(1, 4, key="job_t.0.t") == (False, "source run job_t.0.t is not on this rank")
    assert (rank.midstream_status()["runs"], rank.midstream_status()["run_bytes"]) == (1, 96)
    assert rank.midstream_drop_runs([run.key]) == (False, "injected fault")
    faults.switch("lose_run:times=1")
    assert [ok for ok, _ in (begins(1, 4), begins(1, 4))] == [False, True]
    assert rank.midstream_drop_runs([run.key]) == (True, "")
    assert not begins(1, 4)[0]
    wide = msgspec.structs.replace(run, hidden_size=HIDDEN_SIZE + 1)
    assert not rank.midstream_put_run(msgspec.to_builtins(wide))[0]


def test_a_turnstile_gives_each_attempt_its_own_steps(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text("2")
    turnstile = Turnstile(str(tmp_path / "steps"))

    async def taken(attempt: tuple[str, int]) -> int:
        looks = steps = 0

        def ends() -> bool:
            nonlocal looks
            looks += 1
            return looks > 5

        while not ends():
            await turnstile.step(attempt, ends)
            steps += looks <= 5
        return steps

    async def all_taken() -> list[int]:
        return [await taken(("job_a", 1)), await taken(("job_b", 1)), await taken(("job_a", 1))]

    assert asyncio.run(all_taken()) == [2, 2, 0]
