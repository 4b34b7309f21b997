"""Hits over HTTP, with the client and on the command line.

The engine is a fake: a score is its position, and a token is a letter.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from refusal_kit import refuses

from midstream.client import Client
from midstream.schemas.base.errors import MidstreamError
from midstream_review.records import Hit

pytest_plugins = ["shared_stack"]
pytestmark = pytest.mark.xdist_group("shared_stack")

MODEL = "fake-model"
CONDITION = {"at_least": 3.0, "schedule": {"tokens": "all"}}


@pytest.fixture
def guard(client: Client, nameless: None) -> str:
    """A policy of all traffic that turns on at token 3."""
    client.probes.put("calm", weight=np.ones((1, 8)), layer=1, labels=["calm"], thresholds=[None])
    policy: dict[str, Any] = {"probe": "calm", "condition": CONDITION, "actions": ["flag"]}
    client.policies.put("guard", **policy, all_traffic=True, keep_texts=True)
    return "guard"


def hits(client: Client, **chosen: Any) -> list[Hit]:
    return client.hits.list("guard", **chosen).hits


def test_a_hit_has_the_text_around_its_token(client: Client, guard: str) -> None:
    result = client.run(prompts=["hello there", "hi"], max_tokens=3, model=MODEL)
    late, first = sorted(hits(client, tokens=True), key=lambda each: each.request, reverse=True)
    assert first.job == result.id
    assert first.request == 0
    assert first.position == 3
    assert first.score == 3.0
    assert first.threshold == 3.0
    assert first.label == "calm"
    assert first.mode == "shadow"
    assert not first.acted
    assert first.version == 1
    assert first.text is not None
    whole = "hello there" + result.outputs[0].text
    assert whole.startswith(first.text.before + first.text.token + first.text.after)
    assert first.text.before + first.text.token == "hell"
    assert late.text is not None
    assert late.text.before + late.text.token == ("hi" + result.outputs[1].text)[:4]
    assert first.token_ids is not None
    assert client.detokenize(MODEL, first.token_ids).prompt == "hell"
    assert client.hits.get("guard", first.id) == hits(client, at_least=0)[-1 - first.request]


def test_without_keep_texts_a_hit_has_its_place_and_no_text(client: Client, guard: str) -> None:
    version = client.policies.change("guard", keep_texts=False).current.version
    client.run(prompts=["hello there"], max_tokens=1, model=MODEL)
    (found,) = hits(client, tokens=True)
    assert found.version == version
    assert found.position == 3
    assert found.text is None
    assert found.token_ids is None


def test_hits_are_chosen_by_label_version_score_mode_and_mark(client: Client, guard: str) -> None:
    client.run(prompts=["hello there"], max_tokens=1, model=MODEL)
    client.policies.change("guard", condition={"at_least": 5.0}, mode="active")
    client.run(prompts=["hello there"], max_tokens=1, model=MODEL)
    new, old = hits(client)
    assert new.version == 2
    assert new.score == 5.0
    assert new.mode == "active"
    assert new.acted
    client.hits.mark("guard", old.id, "false_alarm", note="a greeting")
    chosen: list[tuple[dict[str, Any], list[str]]] = [
        ({"version": 1}, [old.id]),
        ({"at_least": 4.0}, [new.id]),
        ({"below": 4.0}, [old.id]),
        ({"mode": "active"}, [new.id]),
        ({"mark": "false_alarm"}, [old.id]),
        ({"mark": "none"}, [new.id]),
        ({"label": "calm"}, [new.id, old.id]),
        ({"label": "other"}, []),
        ({"limit": 1}, [new.id]),
    ]
    assert [[each.id for each in hits(client, **query)] for query, _ in chosen] == [
        found for _, found in chosen
    ]
    page = client.hits.list("guard", limit=1)
    assert [each.id for each in client.hits.list("guard", cursor=page.next).hits] == [old.id]
    assert [each.id for each in client.hits.every("guard")] == [new.id, old.id]
    assert hits(client, mark="false_alarm")[0].mark.note == "a greeting"  # type: ignore[union-attr]
    [entry] = client.changes.list(limit=1).entries
    assert entry.what == "mark"
    assert entry.name == old.id
    assert entry.before == {MODEL: {"policy": "guard", "mark": None}}
    assert entry.after[MODEL]["mark"]["verdict"] == "false_alarm"


@pytest.mark.parametrize(
    ("call", "field", "word"),
    [
        (lambda client: client.hits.list("guard", mark="wrong"), "mark", "false_alarm"),
        (lambda client: client.hits.list("guard", limit=1000), "limit", "200"),
        (lambda client: client.hits.list("guard", version=0), "version", "1"),
        (lambda client: client.hits.list("guard", cursor="x"), "cursor", "next"),
        (lambda client: client.hits.list("other"), "name", "guard"),
        (lambda client: client.hits.get("guard", "job_x_0"), None, "unknown hit"),
        (lambda client: client.hits.mark("guard", "job_x_0", "right"), None, "unknown hit"),
        (lambda client: client.hits.mark("guard", "job_x_0", "good"), "verdict", "right"),
        (lambda client: client.hits.mark("guard", "x", "right", "n" * 1001), "note", "1000"),
    ],
)
def test_a_wrong_question_is_refused_by_name(
    client: Client, guard: str, call: Callable[[Client], Any], field: str | None, word: str
) -> None:
    with pytest.raises(MidstreamError) as refused:
        call(client)
    assert refused.value.field == field
    assert word in str(refused.value)


def test_marks_become_precision_and_are_exported(
    client: Client, guard: str, midstream: Callable[..., str], tmp_path: Path
) -> None:
    client.run(prompts=["hello there", "other text", "=1+2 three"], max_tokens=1, model=MODEL)
    names = [each.id for each in hits(client)]
    midstream("mark", "guard", names[0], "right", "--note", "it is")
    midstream("mark", "guard", names[1], "false_alarm")
    (of_first,) = client.hits.precision("guard").versions
    assert of_first.right == 1
    assert of_first.false_alarm == 1
    assert of_first.precision == 0.5
    assert "50%" in midstream("list", "precisions", "guard")
    listed = midstream("list", "hits", "guard")
    assert all(name in listed for name in names)
    assert "false alarm" in listed
    shown = midstream("get", "hit", names[0], "--set", "policy=guard")
    assert "it is" in shown
    lines = midstream("export", "hits", "guard").splitlines()
    assert [json.loads(line)["id"] for line in lines] == names
    table = tmp_path / "hits.csv"
    midstream("export", "hits", "guard", "-o", str(table), "--set", "mark=right")
    (row,) = csv.DictReader(table.open())
    assert row["id"] == names[0]
    assert row["mark"] == "right"
    assert row["note"] == "it is"
    midstream("export", "hits", "guard", "-o", str(table))
    assert any(row["before"].startswith("'=") for row in csv.DictReader(table.open()))
    client.hits.unmark("guard", names[0])
    assert client.hits.precision("guard").versions[0].precision == 0.0


def test_texts_are_deleted_and_hits_and_marks_stay(client: Client, guard: str) -> None:
    jobs = [client.run(prompts=["hello there"], max_tokens=1, model=MODEL).id for _ in range(2)]
    client.hits.mark("guard", hits(client)[0].id, "right")
    client.hits.delete_texts(job=jobs[0])
    new, old = hits(client)
    assert old.text is None
    assert new.text is not None
    client.hits.delete_texts()
    new, old = hits(client)
    assert new.text is None
    assert new.mark is not None


def test_examples_need_marks_of_both_kinds_and_texts(client: Client, guard: str) -> None:
    client.run(prompts=["hello there", "other text"], max_tokens=1, model=MODEL)
    first, second = hits(client)
    with refuses("0 hits of policy 'guard' are marked", field="hits"):
        client.hits.examples("guard")
    client.hits.mark("guard", first.id, "right")
    client.hits.mark("guard", second.id, "unsure")
    with refuses("1 right, 0 false alarms", field="hits"):
        client.hits.examples("guard")
    client.hits.mark("guard", second.id, "false_alarm")
    right, wrong = client.hits.examples("guard")
    assert right.id == first.id
    assert right.right
    assert len(right.token_ids) == 4
    assert wrong.id == second.id
    assert not wrong.right
    client.hits.delete_texts()
    with refuses("keep_texts", field="hits"):
        client.hits.examples("guard")


# --- Replays


def test_a_replay_says_what_another_condition_would_gain_and_lose(
    client: Client, guard: str, midstream: Callable[..., str]
) -> None:
    """Of prompts as they were; nothing is counted, kept or done."""
    long = client.run(prompts=["hello there", "hi"], max_tokens=1, model=MODEL)
    client.run(prompts=["hell"], max_tokens=1, model=MODEL)
    before = [each.id for each in client.hits.every("guard")]
    (counted,) = client.policies.get("guard").days
    stricter = client.replays.run("guard", condition={"at_least": 9.0}, last=3, progress=False)
    assert stricter.old == 1
    assert stricter.new == 1
    assert stricter.changed
    assert stricter.prompts == 3
    assert stricter.kept == 1
    assert stricter.gained == []
    (lost,) = stricter.lost
    assert lost.old is not None
    assert lost.old.position == 3
    assert lost.old.score == 3.0
    assert lost.new is None
    assert lost.request == 0
    assert lost.text is not None
    assert lost.text.before + lost.text.token == "hell"
    client.policies.change("guard", condition={"at_least": 1.0})
    of_hits = client.replays.run("guard", version=1, of="hits", last=1, progress=False)
    assert of_hits.old == 2
    assert of_hits.new == 1
    assert of_hits.prompts == 1
    assert of_hits.kept == 1
    back = client.replays.run("guard", against=1, last=3, progress=False)
    assert [(each.job, each.request) for each in back.gained] == [(long.id, 1)]
    assert [each.id for each in client.hits.every("guard")] == before
    (after,) = client.policies.get("guard").days
    assert after == counted
    said = midstream("replay", "guard", "--version", "1", "--last", "5")
    assert "Lost: only the old version" in said
    assert long.id in said


@pytest.mark.parametrize(
    ("fields", "field", "word"),
    [
        ({}, "version", "compared with itself"),
        ({"version": 7}, "version", "7 is not kept"),
        ({"version": 1, "against": 9}, "against", "9 is not kept"),
        ({"condition": {"at_least": 1.0, "label": "x"}}, "condition.label", "calm"),
        ({"condition": {"at_least": 1.0}, "last": 5000}, "last", "1000"),
        ({"condition": {"at_least": 1.0}, "of": "harvest"}, "of", "harvest"),
        ({"condition": {"at_least": 1.0}, "of": "hits"}, "of", "no prompt of hits is kept"),
    ],
)
def test_a_replay_that_cannot_be_is_refused_by_field(
    client: Client, guard: str, fields: dict[str, Any], field: str, word: str
) -> None:
    with refuses(word, field=field):
        client.replays.run("guard", progress=False, **fields)


# --- From marks to a probe


def test_marks_train_a_probe_at_the_site_of_the_policy(
    client: Client, guard: str, midstream: Callable[..., str]
) -> None:
    """Its rows are those of the hits' tokens."""
    prompts = [f"{start}{number} and more" for start in ("aaa", "zzz") for number in "bcdefghi"]
    client.run(prompts=prompts, max_tokens=1, model=MODEL)
    for each in client.hits.every("guard"):
        right = prompts[each.request].startswith("a")
        client.hits.mark("guard", each.id, "right" if right else "false_alarm")
    midstream("fit", "probe", "better", "--from", "hits:guard")
    made = client.probes.get("better").content
    assert made.layer == 1
    assert made.hook == "post_block"
    assert made.labels == ["calm"]
    captured = client.jobs.list(limit=1).jobs[0].id
    asked = httpx2.get(f"{client.url}/v1/jobs/{captured}/request").json()
    assert asked["prompts_total"] == len(prompts)
    assert {each["tokens"] for each in asked["prompts"]} == {4}
