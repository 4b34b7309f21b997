"""`map`: order, limits, retries, the cache, what its key covers, and a prompt's share of a result.

Against a real HTTP server with invented jobs.
"""

import itertools
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_kit import job_view
from map_kit import Jobs, serving
from refusal_kit import refuses

from midstream import AsyncClient, Client, Mapped, MidstreamError
from midstream.client import values
from midstream.client.sdk import standing, wire
from midstream.schemas.artifacts.loras import LoraUse
from midstream.schemas.artifacts.probes import ProbeResult
from midstream.schemas.base.errors import Problem, invalid
from midstream.schemas.jobs.jobs import (
    CaptureResults,
    ConsumerReport,
    Determinism,
    FileEntry,
    JobRequest,
    JobView,
    Output,
    RankReport,
    StageReport,
    State,
)
from midstream.schemas.jobs.results import JobResult
from midstream.schemas.readings.features import FeaturesReading
from midstream.schemas.readings.installed import ReaderReading
from midstream.schemas.readings.lens import LensReading
from midstream_lab.client.mapping import key as map_key, map as mapping
from midstream_lab.client.mapping.cache import MapCache
from midstream_lab.client.mapping.map import sliced


def mapped(jobs: Jobs, prompts: Any, **options: Any) -> list[Mapped]:
    with serving(jobs) as url, Client(url) as client:
        return list(client.map(prompts, **{"model": "m", "progress": False, **options}))


def texts(items: list[Mapped]) -> list[str]:
    return [item.text for item in items]


def failed(kind: str, **fields: Any) -> Problem:
    return MidstreamError(kind, "it failed", **fields).problem()


# --- Jobs ---


def test_results_come_in_the_order_of_the_input() -> None:
    jobs = Jobs()
    items = mapped(jobs, [f"p{number}" for number in range(10)], job_prompts=3, in_flight=2)
    assert texts(items) == [f"<p{number}>" for number in range(10)]
    assert [(item.index, item.request, item.cached) for item in items[:4]] == [
        (0, 0, False),
        (1, 1, False),
        (2, 2, False),
        (3, 0, False),
    ]
    assert [len(body["prompts"]) for body in jobs.bodies] == [3, 3, 3, 1]
    assert jobs.most <= 2


def test_results_may_come_as_they_are_complete() -> None:
    jobs = Jobs(slow={0})
    with serving(jobs) as url, Client(url) as client:
        items = client.map(
            ["abcdef", *"bcdef"],
            model="m",
            ordered=False,
            job_prompts=1,
            in_flight=3,
            progress=False,
        )
        first = [next(items).index for _ in range(5)]
        jobs.slow.clear()
        assert sorted(first) == [1, 2, 3, 4, 5]
        assert [item.index for item in items] == [0]


async def test_the_awaiting_client_maps_too() -> None:
    with serving(Jobs()) as url:
        async with AsyncClient(url) as client:
            items = client.map(["a", "b", "c"], model="m", job_prompts=2)
            assert [item.text async for item in items] == ["<a>", "<b>", "<c>"]


@pytest.mark.parametrize("cached", [False, True])
def test_an_endless_generator_is_read_only_as_far_as_needed(tmp_path: Path, cached: bool) -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        for read in itertools.count(1):
            yield f"p{read}"

    jobs = Jobs()
    cache = {"cache": tmp_path / "cache"} if cached else {}
    with serving(jobs) as url, Client(url) as client:
        items = client.map(
            endless(), model="m", job_prompts=4, in_flight=2, progress=False, **cache
        )
        assert [next(items).text for _ in range(9)] == [f"<p{number}>" for number in range(1, 10)]
        items.close()  # type: ignore[attr-defined]
    assert read <= 9 + 2 * 4 * 2 + 4
    assert bool(jobs.cancelled) is not cached


def test_cached_prompts_are_read_only_as_far_as_needed(tmp_path: Path) -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        for prompt in itertools.cycle("ab"):
            read += 1
            yield prompt

    jobs = Jobs()
    with serving(jobs) as url, Client(url) as client:
        options: dict[str, Any] = {"model": "m", "cache": tmp_path / "cache", "progress": False}
        assert len(list(client.map(["a", "b"], **options))) == 2
        items = client.map(endless(), job_prompts=4, in_flight=2, **options)
        assert [next(items).text for _ in range(9)] == ["<a>", "<b>"] * 4 + ["<a>"]
        items.close()  # type: ignore[attr-defined]
    assert read <= 9 + 2 * 4 * 2
    assert jobs.submitted == 1


def test_token_ids_and_conversations_are_mapped() -> None:
    jobs = Jobs()
    assert len(mapped(jobs, [[1, 2], (3,)])) == 2
    assert len(mapped(jobs, [[{"role": "user", "content": "a"}]])) == 1
    assert jobs.bodies[0]["prompts"] == [[1, 2], [3]]
    assert jobs.bodies[1]["messages"] == [[{"role": "user", "content": "a"}]]


def test_long_prompts_are_jobs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "JOB_BYTES", 10)
    jobs = Jobs()
    mapped(jobs, ["a", "b" * 20, "c", "d"], in_flight=1)
    assert [len(body["prompts"]) for body in jobs.bodies] == [1, 1, 2]
    assert jobs.most == 1


# --- Refusals and failures ---


def test_a_refusal_that_passes_is_repeated_when_the_server_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "PAUSE_S", 0.01)
    full = MidstreamError("too_many_jobs", "full")
    jobs = Jobs(refusals=[(full, 0), (full, 1), (MidstreamError("overloaded", "full"), None)])
    assert texts(mapped(jobs, ["a", "b"], job_prompts=1)) == ["<a>", "<b>"]
    assert jobs.submitted == 5


@pytest.mark.parametrize(
    ("changed", "cached"),
    [
        ({"max_tokens": 5}, False),
        ({"sampling": {"seed": 3}}, False),
        ({"steering": [{"layers": 1, "vector": [1.0]}]}, False),
        ({"capture": {"layers": 1}}, False),
        ({"lens": {"layers": 1}}, False),
        ({"priority": "low", "expires_in": 60, "metadata": {"run": "2"}, "job_prompts": 7}, True),
    ],
)
def test_the_key_covers_every_field_but_how_jobs_are_handled(
    tmp_path: Path, changed: dict[str, Any], cached: bool
) -> None:
    mapped(Jobs(), ["a"], cache=tmp_path / "cache")
    (item,) = mapped(Jobs(), ["a"], cache=tmp_path / "cache", **changed)
    assert item.cached is cached


def test_refusals_that_last_and_bodies_that_are_too_large_end_or_are_halved() -> None:
    jobs = Jobs(refusals=[(MidstreamError("too_many_jobs", "full"), 0)] * 50)
    with refuses("full"):
        mapped(jobs, ["a"], patience=0.0)
    jobs = Jobs(biggest=2)
    assert texts(mapped(jobs, list("abcdefghi"), job_prompts=8)) == [
        f"<{letter}>" for letter in "abcdefghi"
    ]
    assert max(jobs.computed.values()) == 1
    assert "".join(jobs.computed) == "abcdefghi"  # the first half first


def test_a_job_that_failed_for_no_fault_of_its_own_is_submitted_again() -> None:
    jobs = Jobs(failures=[failed("worker_lost"), failed("engine_failed")])
    assert texts(mapped(jobs, ["a", "b"])) == ["<a>", "<b>"]
    assert len(jobs.jobs) == 3
    jobs = Jobs(failures=[failed("worker_lost")] * 9)
    with refuses("it failed") as caught:
        mapped(jobs, ["a", "b"], attempts=2)
    assert "prompts 0 to 1" in str(caught.value.__notes__)
    assert len(jobs.jobs) == 2


def test_an_error_names_the_prompt_by_its_place_in_the_input() -> None:
    jobs = Jobs(refusals=[(invalid("prompts[1]", "is too long"), None)])
    prompts = [f"p{number}" for number in range(6)]
    with refuses(field="prompts[1]") as caught:
        mapped(jobs, prompts, job_prompts=2)
    jobs = Jobs(failures=[])
    with serving(jobs) as url, Client(url) as client:
        items = client.map(prompts, model="m", job_prompts=2, in_flight=1, progress=False)
        next(items)
        jobs.refusals.append((invalid("prompts[1].text", "is too long"), None))
        with refuses() as caught:
            list(items)
    assert caught.value.field == "prompts[5].text"


@pytest.mark.parametrize(
    ("prompts", "options", "field"),
    [
        ("text", {}, "prompts"),
        ([object()], {}, "prompts[0]"),
        (["a", [{"role": "user", "content": "a"}]], {}, "prompts[1]"),
        (["a"], {"job_prompts": 5000}, "job_prompts"),
        (["a"], {"in_flight": 0}, "in_flight"),
        (["a"], {"attempts": 0}, "attempts"),
        (["a"], {"prompt": "b"}, "prompt"),
        (["a"], {"maxtokens": 3}, "maxtokens"),
        (["a"], {"keep_captures": True}, "keep_captures"),
        (["a"], {"capture": {"layers": 1, "run": "clean"}}, "capture.run"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_sent(
    prompts: Any, options: dict[str, Any], field: str
) -> None:
    jobs = Jobs()
    with refuses() as caught:
        mapped(jobs, prompts, **options)
    assert caught.value.field == field
    assert jobs.submitted == 0


# --- The cache ---


def test_a_second_run_computes_only_what_is_missing(tmp_path: Path) -> None:
    jobs = Jobs()
    first = mapped(jobs, ["a", "b", "c"], cache=tmp_path / "cache")
    second = mapped(jobs, ["c", "x", "a", "y"], cache=tmp_path / "cache")
    assert texts(first) == ["<a>", "<b>", "<c>"]
    assert texts(second) == ["<c>", "<x>", "<a>", "<y>"]
    assert [item.cached for item in second] == [True, False, True, False]
    assert jobs.computed == {letter: 1 for letter in "abcxy"}


def test_equal_prompts_share_one_result(tmp_path: Path) -> None:
    jobs = Jobs()
    assert texts(mapped(jobs, ["a", "b", "a", "a"], cache=tmp_path / "cache", job_prompts=2)) == [
        "<a>",
        "<b>",
        "<a>",
        "<a>",
    ]
    assert jobs.computed == {"a": 1, "b": 1}
    mapped(jobs, ["c", "c"])
    assert jobs.computed["c"] == 2  # without a cache they are separate requests


@pytest.mark.parametrize("changed", [{"identity": "other"}, {"steering": "other"}])
def test_the_key_covers_the_model_and_global_steering(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    mapped(Jobs(), ["a"], cache=tmp_path / "cache")
    (item,) = mapped(Jobs(**changed), ["a"], cache=tmp_path / "cache")  # type: ignore[arg-type]
    assert not item.cached


def test_a_module_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache": tmp_path / "cache", "steering": [{"module": "joy"}]}
    (item,) = mapped(Jobs(modules={"joy": "first"}), ["a"], **options)
    assert item.text == "<a>"
    with refuses("joy"):
        mapped(Jobs(modules={"joy": "second"}), ["b"], **options)


def test_jobs_of_a_run_that_was_left_are_found_again(tmp_path: Path) -> None:
    jobs = Jobs()
    with serving(jobs) as url, Client(url) as client:
        items = client.map(
            list("abcdefgh"),
            model="m",
            cache=tmp_path / "cache",
            job_prompts=2,
            in_flight=3,
            progress=False,
        )
        next(items)
        items.close()  # type: ignore[attr-defined]
        assert texts(
            list(client.map(list("abcdefgh"), model="m", cache=tmp_path / "cache", job_prompts=2))
        ) == [f"<{x}>" for x in "abcdefgh"]
    assert jobs.computed == {letter: 1 for letter in "abcdefgh"}
    assert jobs.cancelled == []


def test_a_job_of_a_former_run_that_failed_is_submitted_anew(tmp_path: Path) -> None:
    jobs = Jobs(failures=[failed("capture_failed")])
    with refuses("it failed"):
        mapped(jobs, ["a"], cache=tmp_path / "cache")
    assert texts(mapped(jobs, ["a"], cache=tmp_path / "cache")) == ["<a>"]


# field case: a server's words never become paths
def test_a_hostile_job_id_does_not_leave_the_cache(tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))
    (item,) = mapped(Jobs(name="../../../out/{}"), ["a"], cache=tmp_path / "cache")
    assert item.result.id == "../../../out/0"
    cache = MapCache(tmp_path / "cache")
    cache.store({"k" * 64: item.result}, tmp_path / "cache" / "captures" / "..")
    with cache.downloads() as folder, pytest.raises(ValueError, match="digest"):
        cache.keep(folder, "../../out")
    assert cache.load(["k" * 64], rows=False)["k" * 64][1] is None
    assert cache.load(["k" * 64], rows=True) == {}
    outside = (
        set(tmp_path.rglob("*"))
        - before
        - set((tmp_path / "cache").rglob("*"))
        - {tmp_path / "cache"}
    )
    assert outside == set()


@pytest.mark.parametrize(
    ("name", "words"),
    [("text", "not a database"), ("newer", "format 9"), ("file", "cannot be used")],
)
def test_another_file_in_the_place_of_the_cache_is_refused(
    tmp_path: Path, name: str, words: str
) -> None:
    for folder in ("text", "newer"):
        (tmp_path / folder).mkdir()
    (tmp_path / "text" / "results.sqlite").write_bytes(b"something else" * 100)
    with sqlite3.connect(tmp_path / "newer" / "results.sqlite") as db:
        db.execute("PRAGMA user_version = 9")
    (tmp_path / "file").write_text("")
    with refuses(words):
        mapped(Jobs(), ["a"], cache=tmp_path / name)


def test_results_that_cannot_be_read_or_failed_are_computed_again(tmp_path: Path) -> None:
    mapped(Jobs(), ["a"], cache=tmp_path)
    with sqlite3.connect(tmp_path / "results.sqlite") as db:
        db.execute("UPDATE results SET value = 'x'")
    (item,) = mapped(Jobs(), ["a"], cache=tmp_path)
    assert not item.cached


# --- Map parts ---


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
    captures = part.capture_results
    determinism = part.determinism
    assert determinism is not None
    assert [output.text for output in part.outputs] == [f"t{number}"]
    assert [file.path for file in captures.files] == [f"{number}-0", f"{number}-1"]
    assert captures.bytes == 2 * (10 + number)
    assert captures.rows == 2 * (1 + number)
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
    request = values.request(
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
        JobRequest,
    )
    kinds = {
        "module": ["calm", "joy", "row"],
        "sae": ["first", "second"],
        "run": ["clean"],
        "probe": ["doubt", "lies"],
    }
    kinds |= {"tuned": ["lens"], "lora": ["french"]}
    assert sorted(standing.named(request, {})) == sorted(
        (kind, name) for kind, names in kinds.items() for name in names
    )


def a_view(**changes: Any) -> JobView:
    """Of a job that used a module, a tuned lens and an autoencoder, and was watched."""
    fields: dict[str, Any] = {
        "modules": {"joy": "of joy"},
        "contents": {
            "sae/first": "of first",
            "tuned/lens": "of lens",
            "policy/guard": "of guard",
        },
        "identity": "a",
        "global_version": 3,
    }
    return job_view(**fields | changes)


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
        standing.identity(card)


def test_keys_cover_contents_order_and_attempts() -> None:
    request = values.request(
        None, {"model": "m", "prompts": ["-"], "steering": [{"module": "joy"}]}, JobRequest
    )
    keys = {
        map_key.base(request, identity, {("module", "joy"): digest}, "")
        for digest in ("first", "second")
        for identity in "ab"
    }
    assert len(keys) == 4
    assert len({map_key.of_job(b"base", ["a", "b"], attempt) for attempt in range(3)}) == 3
    assert map_key.of_job(b"base", ["a", "b"]) != map_key.of_job(b"base", ["b", "a"])


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    MapCache(tmp_path).close()
    for name, age in {"old": 2.0, "new": 0.0}.items():
        folder = tmp_path / "captures" / f".part-{name}"
        folder.mkdir()
        os.utime(folder, (time.time() - age * 24 * 3600,) * 2)
    kept = tmp_path / "captures" / ("a" * 64)
    kept.mkdir()
    os.utime(kept, (0, 0))
    MapCache(tmp_path).close()
    assert {path.name for path in (tmp_path / "captures").iterdir()} == {".part-new", kept.name}


def test_many_keys_are_found_and_names_that_are_no_digests_are_no_folders(tmp_path: Path) -> None:
    cache = MapCache(tmp_path)
    keys = [f"{number:064x}" for number in range(1203)]
    cache.store(dict.fromkeys(keys, result(1)), None)
    assert cache.load([*keys, "f" * 64], rows=False).keys() == set(keys)
    assert cache.load(keys, rows=True) == {}
    (tmp_path / "captures" / "elsewhere").mkdir()
    cache.store({"a" * 64: result(1)}, tmp_path / "captures" / "elsewhere")
    assert cache.load(["a" * 64], rows=False)["a" * 64][1] is None
    assert cache.load(["a" * 64], rows=True) == {}
    cache.close()
