"""The rows of kinds of jobs: their parts, their names, and what jobs store of their work."""

import json
import sys
from typing import Any

import msgspec
import pytest
from tree import ROOT
from wire_samples import full

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_msgpack, to_msgpack
from midstream.schemas.jobs.job_kind import JobKind
from midstream.schemas.jobs.jobs import Job, Sampling
from midstream.schemas.jobs.kinds import GROUP, KINDS, OWN, _by_name, kind_of
from midstream.schemas.jobs.results import CommonResult, JobResult
from midstream.schemas.jobs.works import Work
from midstream.schemas.packages import offered, part
from midstream_harvest.records.harvests import HarvestWork
from midstream_lab.records.doses import DoseWork
from midstream_lab.records.fits import FitWork
from midstream_lab.records.sweep_units import SweepWork

#: Kind of a job → one as the build stored it whose jobs had their work unpacked, as hex digits.
FORMER: dict[str, str] = json.loads((ROOT / "tests" / "data" / "former_jobs.json").read_text())
#: Kind of a job → a sample of its work.
WORKS: dict[str, Work] = {
    "sweep": full(SweepWork),
    "attribution": full(SweepWork),
    "harvest": full(HarvestWork),
    "fit": full(FitWork),
    "dose": full(DoseWork),
}


def job_of(kind: str, **changes: Any) -> Job:
    return Job(
        id="job_1", kind=kind, model="m", prompts=[], sampling=Sampling(), created=1.0, **changes
    )


def paths(row: JobKind) -> list[str]:
    """Return all that a row names."""
    named = [row.work, row.submit, row.result, row.outcome, row.routes, row.answer, row.verbs]
    named += [row.things, row.forms]
    named += [*row.run.values(), *row.calls.values(), *row.acts.values()]
    return [path for path in named if path]


@pytest.mark.parametrize("row", KINDS.values(), ids=lambda row: row.name)
def test_every_part_that_a_row_names_is_there(row: JobKind) -> None:
    assert row.run, "some worker runs it"
    assert all(part(path) is not None for path in paths(row))


@pytest.mark.parametrize("row", KINDS.values(), ids=lambda row: row.name)
def test_a_kind_enters_a_queue_whose_workers_run_it(row: JobKind) -> None:
    assert row.queue in row.run


def test_a_row_loads_no_part_by_itself() -> None:
    """In a process that knows nothing yet."""
    assert {*offered(GROUP)} == {*KINDS} - {row.name for row in OWN}
    assert JobKind("other", work="nothing.there:Work").name == "other"
    assert "nothing.there" not in sys.modules


@pytest.mark.parametrize("name", ["chat", "two words", "Upper", "", "9", "a'b"])
def test_a_name_that_is_taken_or_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        _by_name([*OWN, JobKind(name)])


def test_a_result_has_a_field_for_each_kind_that_has_its_own() -> None:
    own = [row.name for row in KINDS.values() if row.result]
    assert own == ["attribution", "dose", "fit", "sweep"]
    assert JobResult.__struct_fields__ == (*CommonResult.__struct_fields__, *own)


def test_a_result_of_a_kind_that_is_not_installed_is_read_without_its_field() -> None:
    body = {
        "id": "job_1",
        "model": "m",
        "state": "succeeded",
        "outputs": [],
        "capture_results": {"job": "job_1", "status": "not_requested"},
        "determinism": None,
        "attempt": 1,
    }
    read = msgspec.convert(body | {"echo": {"layer": 1}}, JobResult)
    assert read == msgspec.convert(body, JobResult)


@pytest.mark.parametrize("kind", WORKS)
def test_jobs_of_the_build_before_the_rows_are_read_and_stored_as_they_were(kind: str) -> None:
    stored = bytes.fromhex(FORMER[kind])
    job = from_msgpack(stored, Job)
    assert job.opened == WORKS[kind]
    assert to_msgpack(job) == stored
    assert to_msgpack(job_of(kind, work=WORKS[kind].packed)) == stored


def test_a_job_of_prompts_stores_no_work() -> None:
    job = job_of("generate")
    assert b"work" not in to_msgpack(job)
    assert from_msgpack(to_msgpack(job), Job).opened == Work()


def test_work_stays_packed_until_it_is_asked_for() -> None:
    job = from_msgpack(to_msgpack(job_of("echo", work=WORKS["dose"].packed)), Job)
    assert from_msgpack(to_msgpack(job), Job) == job, "it is passed on as it is"
    with pytest.raises(MidstreamError, match="'echo'") as found:
        _ = job.opened
    assert found.value.kind == "not_installed"
    assert found.value.problem().status == 501


def test_work_of_another_version_is_refused() -> None:
    job = job_of("dose", work=msgspec.Raw(msgspec.msgpack.encode({"type": "dose", "later": 1})))
    with pytest.raises(MidstreamError, match="another version") as found:
        _ = job.opened
    assert found.value.kind == "version_mismatch"


def test_work_is_given_as_its_own_type_alone() -> None:
    job = job_of("dose", work=WORKS["dose"].packed)
    assert job.work_as(DoseWork) == WORKS["dose"]
    with pytest.raises(TypeError, match="of kind dose"):
        job.work_as(SweepWork)


def test_a_kind_that_is_not_installed_has_a_row_without_parts() -> None:
    assert paths(kind_of("echo")) == [JobKind("echo").work]
