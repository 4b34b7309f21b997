"""Harvests from submission to files, over HTTP, with the fake engine: rows, kills, pauses, full
disks, bad input.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import redis
from edge import refused
from harvest_kit import check_equal, check_rows, checked, texts
from midstream_fake_engine.model import HIDDEN_SIZE
from safetensors import safe_open
from stack import Stack
from survey_kit import examples_of
from tree import ROOT

from midstream.client import Client, MidstreamError
from midstream.schemas.prompts.selectors import HOOKS
from midstream_harvest.reader import Harvest, open as open_harvest, to_hidden_states, verify
from midstream_harvest.records.harvests import HarvestView
from midstream_harvest.surveys.rows import DocumentRows

WAIT_S = 120.0
FORMS = ROOT / "tests" / "data" / "saes"
SMALL = {"mib": 1}
#: So many sites that little text has many units.
WIDE: dict[str, Any] = {"hooks": {hook: [0, 1, 2, 3] for hook in HOOKS}, "shards": SMALL}


#: One longer than a sequence, white space, characters of several tokens.
SAID = ["  Hi\n", "👩‍🚀 über", "a", "x" * 90, "Which\n\nof them? ", "東京 "]
ROLES = ["system", *["user", "assistant"] * 3, "user"]
CHATS = [
    [{"role": role, "content": SAID[at % 6]} for at, role in enumerate(ROLES[n % 2 : 2 + n % 7], n)]
    for n in range(20)
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers of two stages."""
    corpora = tmp_path_factory.mktemp("corpora")
    saes = tmp_path_factory.mktemp("saes")
    shutil.copytree(FORMS, saes / "saes")
    directory = tmp_path_factory.mktemp("harvests")
    with Stack(
        directory,
        api=True,
        workers=2,
        **{"engine.pipeline_parallel_size": 2},
        harvest_sources=str(corpora),
        harvest_stores=str(directory / "rows"),
        artifacts_dir=str(saes),
    ) as running:
        with Client(running.url) as client:
            client.saes.put("tiny", "standard")
        yield running


def corpus(stack: Stack, name: str, documents: Sequence[Any]) -> str:
    path = Path(stack.settings.harvest_sources) / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return name


def large(stack: Stack, name: str, documents: int, characters: int = 1800) -> dict[str, Any]:
    """What is submitted for the rows of two layers of a file; some 60,000 characters are a unit."""
    return {
        "model": "fake-model",
        "source": {"path": corpus(stack, f"{name}.jsonl", texts(documents, characters))},
        "layers": [1, 3],
        "shards": SMALL,
    }


def undisturbed(client: Client, fields: dict[str, Any]) -> Harvest:
    return checked(client.harvests.wait(client.harvests.submit(**fields), timeout=WAIT_S).uri)


def until(
    client: Client,
    view: HarvestView,
    condition: Callable[[HarvestView], bool],
    seconds: float = WAIT_S,
) -> HarvestView:
    deadline = time.monotonic() + seconds
    while True:
        view = client.harvests.get(view)
        if condition(view):
            return view
        assert time.monotonic() < deadline, view
        assert view.state not in ("failed", "cancelled"), view
        time.sleep(0.05)


def test_lines_of_a_request_become_shards_with_every_row(client: Client) -> None:
    documents = texts(20)
    view = client.harvests.submit(
        model="fake-model",
        source={"lines": documents},
        hooks={"post_block": [1, 3], "mlp_out": [0]},
    )
    done = client.harvests.wait(view, timeout=WAIT_S)
    check_rows(checked(done.uri), documents, [("mlp_out", 0), ("post_block", 1), ("post_block", 3)])
    assert done.documents == 20
    assert done.share == 1.0
    assert done.state == "succeeded"
    assert done.rows == sum(map(len, documents))
    assert client.harvests.list(limit=1).harvests[0].id == view.id
    assert view.layers == done.layers == 4
    parts = [job for job in client.jobs.list().jobs if job.metadata.get("harvest") == view.id]
    depths = {job.layers or 0 for job in parts}
    assert depths == {0, 4}, "plan and manifest compute none"


@pytest.mark.parametrize(
    ("window", "kept"),
    [
        ({"last": 2}, lambda positions: positions[-2:]),
        (
            {"head_and_tail": {"head": 1, "tail": 1}},
            lambda positions: [positions[0], positions[-1]],
        ),
        ({"around": {"token_ids": [[0]]}}, lambda positions: []),
    ],
)
def test_a_window_of_each_document_is_harvested(
    client: Client, window: dict[str, Any], kept: Callable[[list[int]], list[int]]
) -> None:
    documents = [text for text in texts(12) if len(text) > 2]
    view = client.harvests.submit(
        model="fake-model",
        source={"lines": documents},
        layers=[1],
        positions={"window": window},
        shards={"shuffle": None},
    )
    done = client.harvests.wait(view, timeout=WAIT_S)
    assert verify(done.uri).faults == []
    found: dict[int, list[int]] = {}
    for path in Path(done.uri).rglob("*.safetensors"):
        with safe_open(str(path), "np") as file:
            places = zip(file.get_tensor("documents"), file.get_tensor("positions"), strict=True)
            for document, position in places:
                found.setdefault(int(document), []).append(int(position))
    wanted = {n: kept([*range(len(text))]) for n, text in enumerate(documents)}
    assert found == {n: positions for n, positions in wanted.items() if positions}
    assert done.rows == sum(map(len, wanted.values()))


@pytest.mark.parametrize(
    ("fields", "kept", "more"),
    [
        ({"cut": {"max_length": 64}}, lambda rows: [row for row in rows if row[1] < 64], 0),
        ({"cut": {"max_length": 64, "fit": "split"}}, list, 0),
        pytest.param({"cut": {"max_length": 64, "fit": "pack"}}, list, 0, marks=pytest.mark.long),
        pytest.param(
            {"window": {"last": 1}},
            lambda rows: list({row[0]: row for row in rows}.values()),
            0,
            marks=pytest.mark.long,
        ),
        # the last token that is generated is not computed
        ({"generate": {"max_tokens": 3}}, list, 2 * len(CHATS)),
    ],
)
def test_rows_of_spans_are_at_the_positions_of_tokenize(
    stack: Stack, client: Client, fields: dict[str, Any], kept: Callable[[Any], Any], more: int
) -> None:
    spans = [{"role": "assistant"}, {"turn": -1, "role": "user", "part": "all"}, {"role": "system"}]
    view = client.harvests.submit(
        model="fake-model",
        source={"path": corpus(stack, "chats.jsonl", CHATS), "kind": "chat"},
        layers=[1],
        positions={"spans": spans, **{n: fields.pop(n) for n in {*fields} & {"window"}}},
        shards={"shuffle": None},
        **fields,
    )
    keys = checked(client.harvests.wait(view, timeout=WAIT_S).uri).keys(slice(None))
    found = [*zip(*(column.tolist() for column in keys), strict=True)]
    rows = set()
    for (number, chat), span in product(enumerate(CHATS), spans):
        body = {"model": "fake-model", "messages": chat, "positions": span}
        answer = httpx2.post(f"{stack.url}/v1/tokenize", json=body).json()
        # none where there is no such turn
        rows |= {(number, at, answer["tokens"][at]) for at in answer.get("positions", [])}
    wanted = kept(sorted(rows))
    assert [row for row in found if row in wanted] == wanted
    assert len(found) == len(wanted) + more


@pytest.mark.long
def test_workers_share_a_corpus_and_a_killed_one_costs_nothing(
    stack: Stack, client: Client
) -> None:
    documents = texts(100, 330)
    source = {"path": corpus(stack, "shared.jsonl", documents)}
    fields = {"model": "fake-model", "source": source, **WIDE}
    made = undisturbed(client, fields)
    check_rows(made, documents, made.sites)
    view = client.harvests.submit(**fields)
    for name in ("worker", "worker-2", "relay", "callbacks"):
        done = client.harvests.get(view).units_done
        if done == len(made.units):
            break
        stack.crash(name)
        until(
            client,
            view,
            lambda view, done=done: view.units_done > done or view.state == "succeeded",
        )
    view = client.harvests.wait(view, timeout=WAIT_S)
    check_equal(checked(view.uri), made)


@pytest.mark.long
def test_a_survey_finds_what_all_rows_at_once_show(client: Client) -> None:
    import torch

    from midstream.workers.runner.readings.sae import load

    fields: dict[str, Any] = {
        "model": "fake-model",
        "source": {"lines": texts(60, 4)},
        "layers": [1, 3],
        "shards": SMALL,
    }
    view = client.harvests.wait(client.harvests.submit(**fields), timeout=WAIT_S)
    survey = client.harvests.survey(view, sae="tiny", top=3, context=2)
    harvest = open_harvest(view.uri)
    keys = harvest.keys(slice(None))
    order = np.lexsort((keys.positions, keys.documents))
    rows = harvest.rows(slice(None), layer=1)[order]
    registered = client.saes.get("tiny")
    active = load(FORMS / registered.path, registered.digest).encode(torch.from_numpy(rows)).numpy()
    keyed = DocumentRows(*[column[order] for column in keys], active)
    assert survey.density[:, 0].tolist() == ((active > 0).sum(0) / len(rows)).tolist()
    mean = active.sum(0, dtype=np.float64) / np.maximum(1, (active > 0).sum(0))
    np.testing.assert_allclose(survey.array("mean")[:, 0], mean, rtol=1e-6)
    for feature in range(active.shape[1]):
        expected = examples_of(keyed, feature, 3, 2)
        for example, (document, position, value, near) in zip(
            survey.examples(feature), expected, strict=True
        ):
            assert example.document == document
            assert example.position == position
            assert example.value == pytest.approx(value, rel=1e-6)
            assert list(zip(example.positions, example.token_ids, strict=True)) == [
                place[:2] for place in near
            ]
            assert example.values == pytest.approx([place[2] for place in near], rel=1e-6)
    now = client.harvests.get(view)
    assert now.surveys == [survey.survey]
    (listed,) = client.harvests.list(surveyed="tiny").harvests
    assert listed.id == view.id
    assert listed.surveys == now.surveys
    assert client.harvests.list(surveyed="another").harvests == []
    figures = {each.feature: each for each in survey.features(limit=100)}
    assert survey.view(limit=1, feature=3).figures == figures[3]
    assert len(survey) == len(rows)
    assert survey.survey.survey.sae == registered.stored()
    assert now.bytes == view.bytes + survey.survey.bytes
    assert verify(view.uri).ok
    client.modules.put("moved", [{"layers": [1], "vector": np.ones(HIDDEN_SIZE)}])
    other = client.harvests.submit(**fields, steering=[{"module": "moved"}], at="after")
    with pytest.raises(MidstreamError, match="this engine has no checkpoint"):
        client.harvests.survey(view, against=client.harvests.wait(other, timeout=WAIT_S).id)
    client.harvests.delete(view)
    assert not Path(view.uri).exists()


def test_surveys_that_cannot_be_right_are_refused_by_name(stack: Stack, client: Client) -> None:
    client.modules.put("shift", [{"layers": [1], "vector": np.ones(HIDDEN_SIZE)}])
    client.modules.put(
        "late", [{"layers": [1], "vector": np.ones(HIDDEN_SIZE), "positions": {"start": 1}}]
    )
    plain: dict[str, Any] = {"model": "fake-model", "layers": [1, 3], "source": {"lines": ["a b"]}}
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "before": {"steering": [{"module": "shift"}]},
        "others": {"source": {"lines": ["a b", "c"]}},
        "layers": {"layers": [1]},
        "bytes": {"dtype": "int8"},
    }
    views = {name: client.harvests.submit(**plain | more) for name, more in changes.items()}
    for view in views.values():
        client.harvests.wait(view, timeout=WAIT_S)

    def refuses(status: int, field: str, says: str, **body: Any) -> None:
        path = f"{stack.url}/v1/harvests/{views['plain'].id}/surveys"
        problem = refused(httpx2.post(path, json=body, timeout=60), status, None, says)
        assert problem.get("field", "") == field, problem

    refuses(400, "sae", "is required without `against`")
    refuses(400, "sae", "unknown sparse autoencoder", sae="none")
    refuses(400, "top", "256", sae="tiny", top=257)
    refuses(404, "", "unknown harvest", against="hrv_none")
    for name, says in {
        "before": "has rows from before its steering: `at` must be after",
        "layers": "lacks post_block of layer 3",
        "bytes": "has rows rounded to int8",
        "others": "the documents of its source",
    }.items():
        refuses(400, "against", says, against=views[name].id)
    for steering, says in (
        ([{"layers": [1], "vector": [1.0] * HIDDEN_SIZE}], "steering[0].module"),
        ([{"module": "late"}], "at some positions only"),
    ):
        with pytest.raises(MidstreamError, match=re.escape(says)):
            client.harvests.submit(**plain, steering=steering)
    with pytest.raises(MidstreamError, match="served without adapters"):
        client.harvests.submit(**plain, lora="none")
    # the tensors of a module are held until its harvest ends
    assert redis.Redis.from_url(stack.settings.redis_url).keys("ms:pins:harvest:*") == []


def test_progress_is_streamed_until_the_end(stack: Stack, client: Client) -> None:
    view = client.harvests.submit(model="fake-model", source={"lines": texts(50)}, layers=[0])
    kinds = []
    last = {}
    with httpx2.stream(
        "GET", f"{stack.url}/v1/harvests/{view.id}/events", timeout=WAIT_S
    ) as response:
        for line in response.iter_lines():
            if line.startswith("event: "):
                kinds.append(line[7:])
            elif line.startswith("data: "):
                last = json.loads(line[6:])
    assert kinds[-1] == "done"
    assert set(kinds[:-1]) == {"progress"}
    assert last == {"state": "succeeded"}


def test_a_harvest_is_paused_resumed_cancelled_and_deleted(stack: Stack, client: Client) -> None:
    source = {"path": corpus(stack, "pause.jsonl", texts(100, 400))}
    view = client.harvests.submit(model="fake-model", source=source, **WIDE)
    until(client, view, lambda view: view.units_done > 0)
    client.harvests.pause(view)
    paused = until(
        client,
        view,
        lambda view: (
            view.state in ("paused", "succeeded") and not view.reason.startswith("pausing")
        ),
    )
    if paused.state == "paused":
        time.sleep(1.0)
        assert client.harvests.get(view).units_done == paused.units_done
        client.harvests.resume(view)
    done = client.harvests.wait(view, timeout=WAIT_S)
    checked(done.uri)
    client.harvests.delete(view)
    assert not Path(done.uri).exists()
    with pytest.raises(MidstreamError, match="unknown harvest"):
        client.harvests.get(view)
    other = client.harvests.submit(model="fake-model", source=source, **WIDE)
    with pytest.raises(MidstreamError, match="has not ended"):
        client.harvests.delete(other)
    client.harvests.cancel(other)
    with pytest.raises(MidstreamError, match="was cancelled"):
        client.harvests.wait(other, timeout=WAIT_S)


def test_a_repeated_submission_is_one_harvest(client: Client) -> None:
    fields: dict[str, Any] = {"model": "fake-model", "source": {"lines": ["a", "b"]}, "layers": [0]}
    first = client.harvests.submit(idempotency_key="once", **fields)
    assert client.harvests.submit(idempotency_key="once", **fields).id == first.id
    with pytest.raises(MidstreamError, match="different body"):
        client.harvests.submit(idempotency_key="once", **fields | {"layers": [1]})


def consumer(stack: Stack, view: HarvestView, folder: Path, *seed: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    script = Path(__file__).parent / "stream_consumer.py"
    return subprocess.Popen(
        [sys.executable, str(script), stack.url, view.id, str(folder), *seed],
        stderr=subprocess.PIPE,
        text=True,
    )


def check_stored(folder: Path, made: Harvest) -> None:
    """A consumer's files are the rows of an ordinary harvest, in its order, bit for bit."""
    units = [np.load(path) for path in sorted(folder.glob("*.npz"))]
    assert [len(unit["documents"]) for unit in units] == [unit.rows for unit in made.units]
    for name, column in made.keys(slice(None))._asdict().items():
        assert np.array_equal(np.concatenate([unit[name] for unit in units]), column)
    for hook, layer in made.sites:
        rows = np.concatenate([unit[f"{hook}.{layer}"] for unit in units])
        assert rows.tobytes() == made.rows(slice(None), layer, hook).tobytes()


def test_a_consumer_that_is_killed_gets_every_row_once(
    stack: Stack, client: Client, tmp_path: Path
) -> None:
    """A worker is killed meanwhile, and what is acknowledged is dropped."""
    fields = large(stack, "stream", 110)
    made = undisturbed(client, fields)
    view = client.harvests.submit(**fields, to={"window": 3})
    first = consumer(stack, view, tmp_path / "rows", "0")
    said = first.communicate(timeout=WAIT_S)[1]
    assert first.returncode == -signal.SIGKILL, said
    stack.crash("worker")
    assert consumer(stack, view, tmp_path / "rows").communicate(timeout=WAIT_S)[1] == ""
    check_stored(tmp_path / "rows", made)
    done = client.harvests.wait(view, timeout=WAIT_S)
    assert done.acknowledged == {"trainer": len(made.units)}
    assert done.bytes == 0
    assert done.rows == len(made)
    assert done.shards == len(made.shards)
    assert not list(Path(done.uri).rglob("*.safetensors"))


def test_a_full_window_holds_its_harvest_and_nothing_else(stack: Stack, client: Client) -> None:
    """While its consumers are away, no part is under way: a job and another harvest end. The slower
    of two consumers moves the window.
    """
    fields = large(stack, "window", 90) | {"layers": [0, 1, 2, 3]}
    names = ["trainer", "probe"]
    view = client.harvests.submit(**fields, to={"consumers": names, "window": 2, "keep": True})

    def is_full(view: HarvestView) -> bool:
        jobs = [client.jobs.get(job).state for job in view.jobs]
        return "its window is full" in view.reason and set(jobs) <= {"succeeded"}

    full = until(client, view, is_full)
    assert full.state == "running"
    assert full.units_done == 2
    assert client.completion(model="fake-model", prompt="beside it", max_tokens=2).text
    made = undisturbed(client, fields)
    assert len(made.units) > 4
    assert client.harvests.get(view).units_done == 2
    page = client.harvests.next_units(view, consumer="probe", wait=0)
    assert [unit.unit for unit in page.units] == [0, 1]
    assert not page.ended
    for harvest, cursor, named, error in (
        (view.id, 3, "probe", "not all ready"),
        (view.id, 10**15, "probe", "not all ready"),
        (view.id, 1, "other", "no consumer 'other'"),
        (made.manifest.id, 0, "trainer", "it was not submitted as a stream"),
    ):
        with pytest.raises(MidstreamError, match=error):
            client.harvests.acknowledge(harvest, cursor, consumer=named)
    for cursor in (2, 1):  # a cursor that was passed changes nothing
        client.harvests.acknowledge(view, cursor, consumer="probe")
    client.harvests.acknowledge(view, 1)
    third = until(client, view, lambda view: is_full(view) and view.units_done > 2)
    assert third.units_done == 3
    assert third.acknowledged == {"trainer": 1, "probe": 2}
    found = zip_longest(*[client.harvests.stream(view, consumer=name) for name in names])
    mine, others = zip(*[[unit and unit.unit.unit for unit in pair] for pair in found], strict=True)
    assert list(mine) == list(range(1, len(made.units)))
    assert list(others) == [*range(2, len(made.units)), None]
    check_equal(checked(client.harvests.wait(view, timeout=WAIT_S).uri), made)


def check_samples(folder: Path, made: Harvest, exported: Path) -> None:
    """Samples are the files that an ordinary harvest exports, bit for bit."""
    paths = to_hidden_states(made.store.uri, exported)
    assert len(list(folder.glob("*.safetensors"))) == len(paths)
    for path in paths:
        with (
            safe_open(path, framework="np") as wanted,
            safe_open(folder / f"{int(path.stem)}.safetensors", framework="np") as found,
        ):
            assert sorted(found.keys()) == ["hidden_states", "loss_mask", "token_ids"]
            for name in found.keys():  # noqa: SIM118
                assert found.get_tensor(name).tobytes() == wanted.get_tensor(name).tobytes()
                assert found.get_tensor(name).shape == wanted.get_tensor(name).shape


def bridged(stack: Stack, view: HarvestView, target: str, **options: Any) -> subprocess.Popen[str]:
    command = ["-m", "midstream.client", "export", "harvest", view.id, "-o", target]
    return subprocess.Popen(
        [sys.executable, *command, "--set", "limit=150"],
        env={**os.environ, "MIDSTREAM_PUBLIC_URL": stack.url},
        text=True,
        stderr=subprocess.PIPE,
        **options,
    )


@pytest.mark.matrix
def test_a_bridge_that_is_killed_writes_every_document_once(
    stack: Stack, client: Client, tmp_path: Path
) -> None:
    fields = large(stack, "bridge", 400, 120)
    made = undisturbed(client, fields)
    view = client.harvests.submit(**fields, to="stream")
    folder = tmp_path / "in"
    taken = tmp_path / "taken"
    taken.mkdir()
    chance = random.Random(1)
    runs = 0
    found: list[Path] = []
    while len(found) < 400:
        runs += 1
        with bridged(stack, view, f"file:{folder}") as process:
            until_s = time.monotonic() + WAIT_S
            enough = len(found) + chance.randint(80, 160)
            while process.poll() is None and time.monotonic() < until_s:
                if runs < 3 and len(found) >= enough:
                    break
                for path in folder.glob("hs_*.safetensors"):
                    assert path.with_name(f"{path.name}.lock").exists()
                    path.rename(taken / path.name.removeprefix("hs_"))
                    assert len(list(taken.iterdir())) == len(found) + 1, "a document came twice"
                    found.append(path)
            process.kill()
    assert runs == 3
    check_samples(taken, made, tmp_path / "exported")


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages of a trainer's environment."""
    target = tmp_path_factory.mktemp("trainers")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, "hs-connectors==0.9.0"], check=True)
    return target


@pytest.mark.matrix
@pytest.mark.packages
def test_hs_connectors_reads_what_the_bridge_hands_over(
    stack: Stack, client: Client, tmp_path: Path, trainers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(trainers))
    fields = large(stack, "file", 300, 120)
    made = undisturbed(client, fields)
    view = client.harvests.submit(**fields, to="stream")
    folder = tmp_path / "in"
    taken = tmp_path / "taken"
    taken.mkdir()
    command = [sys.executable, str(Path(__file__).parent / "trainer.py"), str(folder), str(taken)]
    with bridged(stack, view, f"file:{folder}") as process:
        trainer = subprocess.run([*command, "300"], timeout=WAIT_S, check=False)
        assert trainer.returncode == 0
        assert process.wait(WAIT_S) == 0
    check_samples(taken, made, tmp_path / "exported")
    assert client.harvests.get(view).acknowledged == {"trainer": len(made.units)}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"source": {}}, "source"),
        ({"source": {"lines": ["a"], "path": "b"}}, "source"),
        ({"source": {"lines": []}}, "source.lines"),
        ({"source": {"lines": [[1, 100_000]]}}, "source.lines[0][1]"),
        (
            {"positions": {"window": {"around": {"token_ids": [[100_000]]}}}},
            "positions.window.around.token_ids[0][0]",
        ),
        ({"source": {"path": "missing.jsonl"}}, "source.path"),
        ({"source": {"path": "../outside"}}, "source.path"),
        ({"hooks": {"nowhere": "all"}}, "hooks"),
        ({"layers": [99]}, "layers"),
        ({"cut": {"max_length": 100_000}}, "cut.max_length"),
        ({"cut": {"fit": "fold"}}, "cut.fit"),
        ({"positions": {"every": 0}}, "positions.every"),
        ({"positions": {"window": {"when": {"probe": "p", "at_least": 0}}}}, "positions"),
        ({"positions": {"window": {"last": 2}}, "cut": {"fit": "pack"}}, "body"),
        ({"dtype": "float64"}, "dtype"),
        ({"shards": {"mib": 0}}, "shards.mib"),
        ({"store": "s3://elsewhere"}, "store"),
        ({"generate": {"max_tokens": 100_000}}, "generate.max_tokens"),
        ({"generate": {"max_tokens": 0}}, "generate.max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"positions": {"spans": [{"turn": 0}]}}, "`spans` are parts of conversations"),
        ({"positions": {"spans": [{"text": "a"}]}}, "`spans` take turn, role and part"),
        ({"positions": {"spans": [{"part": "tools"}]}}, "not tools: a harvest has none"),
        ({"positions": {"spans": []}}, "positions.spans"),
        ({"positions": {"spans": [{"turn": 0}] * 9}}, "positions.spans"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(stack: Stack, body: dict[str, Any], field: str) -> None:
    answer = httpx2.post(
        f"{stack.url}/v1/harvests", json={"model": "fake-model", "source": {"lines": ["a"]}, **body}
    )
    problem = refused(answer)
    assert (problem.get("field") or "").startswith(field) or field in problem["detail"], problem


def test_the_script_for_draft_models_writes_their_files(stack: Stack, tmp_path: Path) -> None:
    """The fake model has no chat: any layers and few tokens do."""
    command = [
        sys.executable,
        str(ROOT / "examples" / "draft_training.py"),
        "--out",
        str(tmp_path),
        "--tokens",
        "5",
        "--layers",
        "0",
        "2",
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "MIDSTREAM_PUBLIC_URL": stack.url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "24 files" in done.stdout
    with safe_open(tmp_path / "000000003.safetensors", framework="np") as file:
        states = file.get_tensor("hidden_states")
        mask = file.get_tensor("loss_mask")
    assert states.shape[0] == len(mask) == len("What is the capital of Japan?") + 4
    assert mask.tolist() == [0] * (len(mask) - 4) + [1] * 4
