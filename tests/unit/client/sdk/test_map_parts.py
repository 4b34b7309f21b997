"""Parts of `map`: the share of one prompt in a job's result, what a request names, and the cache's
folders.
"""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from refusal_kit import refuses

from midstream.client.sdk import wire
from midstream.client.sdk.mapping import key as map_key
from midstream.client.sdk.mapping.cache import MapCache
from midstream.client.sdk.mapping.map import sliced
from midstream.schemas.artifacts.loras import LoraUse
from midstream.schemas.artifacts.probes import ProbeResult
from midstream.schemas.jobs.jobs import (
    CaptureResults,
    ConsumerReport,
    Determinism,
    FileEntry,
    JobResult,
    JobView,
    Output,
    RankReport,
    StageReport,
    State,
)
from midstream.schemas.readings.features import FeaturesReading
from midstream.schemas.readings.installed import ReaderReading
from midstream.schemas.readings.lens import LensReading


def lens(prompt: int) -> LensReading:
    return LensReading(
        request=prompt,
        hook="post_block",
        layers=[0],
        positions=[0],
        token_ids=[1],
        top_tokens=[[[1]]],
        top_logprobs=[[[0.0]]],
    )


def features(prompt: int, sae: str) -> FeaturesReading:
    rows: dict[str, list[Any]] = {
        "positions": [],
        "token_ids": [],
        "features": [],
        "activations": [],
        "active": [],
        "errors": [],
    }
    return FeaturesReading(
        request=prompt, sae=sae, digest=f"of {sae}", hook="post_block", layer=0, **rows
    )


def reading(prompt: int, name: str) -> ReaderReading:
    return ReaderReading(
        request=prompt, name=name, package="p", version="1", digest="d", options={}, parts=[]
    )


def result(prompts: int) -> JobResult:
    """Everything that a job reports by prompt; two autoencoders, readers and files for each
    prompt.
    """
    every = range(prompts)
    place = {"rank": 0, "pp": 0, "crc32": 0, "sites": {}, "positions": 1}
    files = [
        FileEntry(path=f"{n}-{k}", request=n, bytes=10 + n, rows=1 + n, **place)
        for n in every
        for k in range(2)
    ]  # type: ignore[arg-type]
    reports = [
        RankReport(
            rank=0, tp=0, request=n, step=n, checksum="0" * 16, actions=1, applied=1, status="ok"
        )
        for n in every
    ]
    return JobResult(
        id="job_1",
        model="m",
        state=State.SUCCEEDED,
        outputs=[
            Output(index=n, text=f"t{n}", token_ids=[n], finish_reason="length", prompt_tokens=1)
            for n in every
        ],
        capture_results=CaptureResults(
            status="ok",
            job="job_1",
            files=files,
            consumers=[ConsumerReport(name="files", request=n, pp=0, ok=True) for n in every],
            bytes=sum(file.bytes for file in files),
            rows=sum(file.rows for file in files),
        ),
        determinism=Determinism(
            consistent=True, stages=[StageReport(pp=0, consistent=True, ranks=reports)]
        ),
        attempt=1,
        lora=LoraUse("french", "of french"),
        lens=[lens(n) for n in every],
        features=[features(n, sae) for n in every for sae in ("first", "second")],
        probes=[
            ProbeResult(request=n, probe="lies", digest="of lies", scores={}, positions=1)
            for n in every
        ],
        readers=[reading(n, name) for n in every for name in ("first", "second")],
    )


@pytest.mark.parametrize("number", range(3))
def test_a_prompts_share_is_what_the_job_reports_of_it(number: int) -> None:
    part = sliced(result(3), number, 3)
    captures, determinism = part.capture_results, part.determinism
    assert determinism is not None
    assert [output.text for output in part.outputs] == [f"t{number}"]
    assert [file.path for file in captures.files] == [f"{number}-0", f"{number}-1"]
    assert (captures.bytes, captures.rows) == (2 * (10 + number), 2 * (1 + number))
    assert [report.request for report in captures.consumers] == [number]
    assert [report.request for stage in determinism.stages for report in stage.ranks] == [number]
    assert [(each.request, each.sae) for each in part.features or []] == [
        (number, "first"),
        (number, "second"),
    ]
    assert [each.request for each in part.lens or []] == [number]
    assert [each.request for each in part.probes] == [number]
    assert [(each.request, each.name) for each in part.readers or []] == [
        (number, "first"),
        (number, "second"),
    ]


def test_what_a_request_names_is_what_jobs_say_that_they_used() -> None:
    request = wire.job_request(
        None,
        {
            "model": "m",
            "prompts": ["-"],
            "steering": [
                {"module": "joy"},
                {"sae": "first", "feature": 3, "op": "clamp", "value": 1.0},
            ],
            "patch": [
                {"layers": 1, "positions": [0], "source": {"run": "clean"}},
                {"layers": 1, "positions": [1], "source": {"module": "row"}},
            ],
            "features": [{"sae": "second"}],
            "probes": ["lies", {"probe": "doubt", "module": "calm"}],
            "lens": {"layers": 1, "tuned": "lens"},
            "lora": "french",
        },
    )
    kinds = {
        "module": ["calm", "joy", "row"],
        "sae": ["first", "second"],
        "run": ["clean"],
        "probe": ["doubt", "lies"],
    }
    kinds |= {"tuned": ["lens"], "lora": ["french"]}
    assert sorted(map_key.named(request)) == sorted(
        (kind, name) for kind, names in kinds.items() for name in names
    )


def a_view(**changes: Any) -> JobView:
    """Of a job that used a module, a tuned lens and an autoencoder, and was watched."""
    fields: dict[str, Any] = {
        "id": "job_1",
        "kind": "generate",
        "model": "m",
        "state": State.SUCCEEDED,
        "attempt": 1,
        "version": 1,
        "created": 1.0,
        "modules": {"joy": "of joy"},
        "contents": {
            "sae/first": "of first",
            "tuned/lens": "of lens",
            "policy/guard": "of guard",
        },
        "identity": "a",
        "global_version": 3,
    }
    return JobView(**fields | changes)


NAMES = {
    ("module", "joy"): "of joy",
    ("sae", "first"): "of first",
    ("tuned", "lens"): "of lens",
    ("policy", "guard"): "of guard",
}


def test_a_job_that_used_what_was_planned_is_accepted() -> None:
    map_key.check(a_view(), "a", NAMES, 3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"identity": "b"}, "the model 'm'"),
        ({"identity": ""}, "the model 'm'"),
        ({"modules": {"joy": "another"}}, "module 'joy'"),
        ({"modules": {}}, "module 'joy'"),
        ({"runs": {"clean": "job_0"}}, "run 'clean'"),
        ({"contents": {}}, "policy 'guard'"),
        ({"contents": a_view().contents | {"tuned/lens": "another"}}, "tuned 'lens'"),
        ({"contents": a_view().contents | {"policy/guard": "another"}}, "policy 'guard'"),
        ({"contents": a_view().contents | {"policy/new": "of new"}}, "policy 'new'"),
        ({"global_version": 4}, "global steering"),
        ({"global_version": 0}, "global steering"),
        ({"global_version": None}, "global steering"),
    ],
)
def test_a_job_that_used_or_reports_anything_else_is_a_conflict(
    changes: dict[str, Any], named: str
) -> None:
    with refuses(match=f"^{named} was changed", kind="conflict"):
        map_key.check(a_view(**changes), "a", NAMES, 3)


@pytest.mark.parametrize("card", [{}, {"identity": ""}, {"identity": None}])
def test_a_service_that_reports_no_identity_is_not_mapped_over(card: dict[str, Any]) -> None:
    with refuses("reports no identity"):
        map_key.identity(card)


def test_the_key_covers_the_content_that_names_stand_for() -> None:
    request = wire.job_request(
        None, {"model": "m", "prompts": ["-"], "steering": [{"module": "joy"}]}
    )
    keys = {
        map_key.base(request, identity, {("module", "joy"): digest}, "")
        for digest in ("first", "second")
        for identity in "ab"
    }
    assert len(keys) == 4


def test_a_job_of_another_attempt_is_another_job() -> None:
    assert len({map_key.of_job(b"base", ["a", "b"], attempt) for attempt in range(3)}) == 3
    assert map_key.of_job(b"base", ["a", "b"]) != map_key.of_job(b"base", ["b", "a"])


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    MapCache(tmp_path).close()
    days = {"old": 2.0, "new": 0.0}
    for name, age in days.items():
        folder = tmp_path / "captures" / f".part-{name}"
        folder.mkdir()
        os.utime(folder, (time.time() - age * 24 * 3600,) * 2)
    kept = tmp_path / "captures" / ("a" * 64)
    kept.mkdir()
    os.utime(kept, (0, 0))
    MapCache(tmp_path).close()
    assert {path.name for path in (tmp_path / "captures").iterdir()} == {".part-new", kept.name}


def test_more_keys_than_one_query_takes_are_found(tmp_path: Path) -> None:
    cache = MapCache(tmp_path)
    keys = [f"{number:064x}" for number in range(1203)]
    cache.store(dict.fromkeys(keys, result(1)), None)
    assert cache.load([*keys, "f" * 64], rows=False).keys() == set(keys)
    assert cache.load(keys, rows=True) == {}
    cache.close()


def test_a_name_in_the_file_that_is_no_digest_is_no_folder(tmp_path: Path) -> None:
    cache = MapCache(tmp_path)
    (tmp_path / "captures" / "elsewhere").mkdir()
    cache.store({"a" * 64: result(1)}, tmp_path / "captures" / "elsewhere")
    assert cache.load(["a" * 64], rows=False)["a" * 64][1] is None
    assert cache.load(["a" * 64], rows=True) == {}
    cache.close()
