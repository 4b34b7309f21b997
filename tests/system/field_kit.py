"""Has a field of a submission an effect, or is it refused by its name?

A field is sent with a value that is not its default. What is stored then differs from what is
stored without it, or the answer does; else the field is one of `WITHOUT`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import httpx2
import msgspec
import pytest
from edge import HIDDEN, MODEL, Api, Hand

from midstream.schemas.jobs.jobs import Job

#: Returns what becomes of a body that is sent to a path.
Outcome = Callable[[str, dict[str, Any]], Any]
#: Path and body → what became of it.
OUTCOMES: dict[tuple[str, bytes], Any] = {}
VECTOR = [1.0] * HIDDEN
STEERING = [{"layers": 1, "vector": VECTOR}]


class With(NamedTuple):
    """A value that needs other fields beside it, which are sent without it, too."""

    value: Any
    beside: dict[str, Any]


class Submission(NamedTuple):
    path: str
    body: dict[str, Any]
    values: dict[str, Any]  # field → a value that is not its default


HANDLING: dict[str, Any] = {
    "priority": "low",
    "expires_in": 60,
    "callback_url": "http://93.184.216.34/",
    "callback_events": With(["job.failed"], {"callback_url": "http://93.184.216.34/"}),
}
#: Accepted, and without effect: what OpenAI's clients send.
WITHOUT = {
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "store",
}
#: Held until what no test here sends: its effect is in test_api_completions.py.
HELD = {"capture_wait"}


def cases(submissions: Mapping[type[msgspec.Struct], Submission]) -> list[Any]:
    """The parameters `kind` and `field` of a test, for every field that is tried."""
    return [
        pytest.param(kind, field, id=f"{kind.__name__}-{field}")
        for kind, submission in submissions.items()
        for field in submission.values
        if field not in HELD
    ]


def check(submission: Submission, field: str, outcome: Outcome) -> None:
    """The field has an effect on `outcome` of path and body, or is refused: then `outcome` is what
    the refusal names.
    """
    value = submission.values[field]
    beside: dict[str, Any] = {}
    if isinstance(value, With):
        value, beside = value
    body = {"model": MODEL, **submission.body, **beside}
    found = outcome(submission.path, {**body, field: value})
    if isinstance(found, str):
        assert found.split(".")[0].split("[")[0] == field
        return
    assert (found == plainly(submission.path, body, outcome)) == (field in WITHOUT)


def check_same(submission: Submission, outcome: Outcome) -> None:
    """The same body has the same outcome, also in another test: what differs is the field's."""
    body = {"model": MODEL, **submission.body}
    kept = plainly(submission.path, body, outcome)
    assert outcome(submission.path, body) == kept


def plainly(path: str, body: dict[str, Any], outcome: Outcome) -> Any:
    """The outcome of a body without the field that is tried: of most fields, of the same body."""
    asked = path, msgspec.json.encode(body)
    if asked not in OUTCOMES:
        OUTCOMES[asked] = outcome(path, body)
    return OUTCOMES[asked]


def job_of(api: Api, hand: Hand, path: str, body: dict[str, Any]) -> Any:
    """The field that a refusal names; else the job that is stored."""
    answer = api.http.post(path, json=body)
    return named(answer) or plain(hand.job(answer.json()["id"]))


def named(answer: httpx2.Response) -> str:
    """The field that a refusal names; empty: it is none."""
    return str(answer.json()["field"]) if answer.status_code >= 400 else ""


def plain(record: msgspec.Struct) -> Any:
    """A record without what is its own: id, place, times and traces."""
    own = {name: getattr(record, name) for name in record.__struct_fields__}
    if isinstance(record, Job):
        own["work"] = record.opened
    members = msgspec.to_builtins(own)
    for name in ("id", "created", "trace", "uri"):
        members.pop(name, None)
    if members.get("expires"):
        members["expires"] = True
    return members
