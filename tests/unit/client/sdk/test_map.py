"""`map`: order, limits, retries, the cache and what its key covers.

Against a real HTTP server with invented jobs.
"""

import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from map_kit import Jobs, serving
from refusal_kit import refuses

from midstream import AsyncClient, Client, Mapped, MidstreamError
from midstream.client.sdk import wire
from midstream.client.sdk.mapping import map as mapping
from midstream.client.sdk.mapping.cache import MapCache
from midstream.schemas.base.errors import Problem, invalid


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
        assert (sorted(first), [item.index for item in items]) == ([1, 2, 3, 4, 5], [0])


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
    assert (read <= 9 + 2 * 4 * 2, jobs.submitted) == (True, 1)


def test_token_ids_and_conversations_are_mapped() -> None:
    jobs = Jobs()
    assert len(mapped(jobs, [[1, 2], (3,)])) == 2
    assert len(mapped(jobs, [[{"role": "user", "content": "a"}]])) == 1
    assert (jobs.bodies[0]["prompts"], jobs.bodies[1]["messages"]) == (
        [[1, 2], [3]],
        [[{"role": "user", "content": "a"}]],
    )


def test_long_prompts_are_jobs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "JOB_BYTES", 10)
    jobs = Jobs()
    mapped(jobs, ["a", "b" * 20, "c", "d"], in_flight=1)
    assert ([len(body["prompts"]) for body in jobs.bodies], jobs.most) == ([1, 1, 2], 1)


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


def test_a_refusal_that_lasts_is_raised() -> None:
    jobs = Jobs(refusals=[(MidstreamError("too_many_jobs", "full"), 0)] * 50)
    with refuses("full"):
        mapped(jobs, ["a"], patience=0.0)


def test_a_body_that_is_too_large_is_halved() -> None:
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
    with refuses("it failed") as caught:
        mapped(jobs := Jobs(failures=[failed("worker_lost")] * 9), ["a", "b"], attempts=2)
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
    assert (caught.value.field, jobs.submitted) == (field, 0)


# --- The cache ---


def test_a_second_run_computes_only_what_is_missing(tmp_path: Path) -> None:
    jobs = Jobs()
    first = mapped(jobs, ["a", "b", "c"], cache=tmp_path / "cache")
    second = mapped(jobs, ["c", "x", "a", "y"], cache=tmp_path / "cache")
    assert (texts(first), texts(second)) == (["<a>", "<b>", "<c>"], ["<c>", "<x>", "<a>", "<y>"])
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


def test_a_result_that_cannot_be_read_is_computed_again(tmp_path: Path) -> None:
    mapped(Jobs(), ["a"], cache=tmp_path)
    with sqlite3.connect(tmp_path / "results.sqlite") as db:
        db.execute("UPDATE results SET value = 'x'")
    (item,) = mapped(Jobs(), ["a"], cache=tmp_path)
    assert not item.cached
