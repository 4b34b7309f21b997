"""Do the broker's tables, names and readings say what the vocabulary says? No server needed."""

import re

import pytest
import redis.asyncio
from hypothesis import given, settings, strategies as st
from kombu.transport import redis as kombu_redis

from midstream.broker.ledger.core import scripts
from midstream.broker.ledger.jobs.ledger import Ledger, new_job_id
from midstream.broker.ledger.jobs.units import LedgerUnits
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.broker.ledger.results import pages
from midstream.broker.queue.celery_app import PRIORITY_STEPS, lists_of, make_app, queue_of
from midstream.broker.queue.visibility import RENEW_S
from midstream.broker.redis_service.availability import is_redis_unavailable
from midstream.schemas.base.errors import STATUS_OF_KIND, MidstreamError
from midstream.schemas.jobs.kinds import KINDS
from midstream.schemas.settings.settings import Settings


def test_every_problem_that_scripts_raise_is_known() -> None:
    folder = scripts.LUA
    assert {file.stem for file in folder.glob("shared/*.lua")} == {*scripts.PARTS}
    raised = {
        kind
        for file in folder.glob("*/*.lua")
        for kind in re.findall(r"fail\(job, '(\w+)'", file.read_text())
    }
    assert raised <= set(STATUS_OF_KIND)
    assert "ranks_disagree" in raised


def test_parts_of_a_ledger_use_its_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers make parts for each job, and binding all scripts takes over a millisecond."""
    ledger = Ledger(redis.asyncio.Redis(), Settings())

    def bind(*_: object) -> None:
        raise AssertionError("bound again")

    monkeypatch.setattr(redis.asyncio.Redis, "register_script", bind)
    assert LedgerUnits(ledger)._run.__self__ is ledger  # type: ignore[attr-defined]
    assert Reaper(ledger)._run.__self__ is ledger  # type: ignore[attr-defined]


def test_job_ids_cannot_be_guessed_and_sort_by_age() -> None:  # field case 40
    ids = [new_job_id() for _ in range(2000)]
    assert len({job_id[13:] for job_id in ids}) == 2000
    assert all(re.fullmatch(r"job_[0-9a-hjkmnp-tv-z]{35}", job_id) for job_id in ids)
    assert [job_id[:13] for job_id in ids] == sorted(job_id[:13] for job_id in ids)


@settings(max_examples=30)
@given(st.text(min_size=1), st.text(min_size=1))
def test_queue_names_are_plain_and_differ_when_models_do(one: str, other: str) -> None:
    assert re.fullmatch(r"midstream\.[A-Za-z0-9._-]+", queue_of(one))
    assert (queue_of(one) == queue_of(other)) == (one == other)


def test_the_lists_of_a_queue_are_those_that_kombu_uses() -> None:
    channel = kombu_redis.Channel
    assert list(PRIORITY_STEPS) == kombu_redis.PRIORITY_STEPS
    expected = [f"q{channel.sep}{step}" if step else "q" for step in PRIORITY_STEPS]
    assert lists_of("q") == expected
    assert {row.step for row in KINDS.values()} <= set(PRIORITY_STEPS)


def test_the_app_takes_json_alone_and_one_message_at_a_time_for_a_short_lease() -> None:
    chosen = Settings(redis_url="redis://127.0.0.1:1/0")
    conf = make_app(chosen).conf
    assert conf.accept_content == conf.result_accept_content == ["json"]
    assert conf.result_backend is None
    assert conf.worker_prefetch_multiplier == 1
    assert chosen.tuning.visibility_timeout_s > RENEW_S * 3


def test_cursors_round_trip_and_invalid_ones_are_refused() -> None:
    assert pages.parse_cursor(pages.format_cursor(1795145199.4220054, "job_a1")) == (
        1795145199.4220054,
        "job_a1",
    )
    assert pages.parse_cursor(None) == (float("inf"), "")
    for bad in ("1", "x:job_a", "1:job a", "nan:job_a", "1:"):
        with pytest.raises(MidstreamError):
            pages.parse_cursor(bad)


@pytest.mark.parametrize(
    ("error", "absent"),
    [
        (redis.exceptions.ConnectionError("refused"), True),
        (
            redis.exceptions.OutOfMemoryError(
                "command not allowed when used memory > 'maxmemory'."
            ),
            True,
        ),
        (
            redis.exceptions.ResponseError(
                "BUSY Redis is busy running a script. You can only call SCRIPT KILL or "
                "SHUTDOWN NOSAVE."
            ),
            True,
        ),
        (
            redis.exceptions.ResponseError(
                "MISCONF Errors writing to the AOF file: No space left on device"
            ),
            True,
        ),
        (
            redis.exceptions.ResponseError(
                "Error running script: @user_script:1: -OOM command not allowed"
            ),
            True,
        ),
        (redis.exceptions.ReadOnlyError("You can't write against a read only replica."), True),
        (redis.exceptions.NoScriptError("No matching script."), True),
        (
            redis.exceptions.ResponseError(
                "WRONGTYPE Operation against a key holding the wrong kind of value"
            ),
            False,
        ),
    ],
)
def test_redis_write_refusals_are_outages_and_bad_commands_are_bugs(
    error: redis.exceptions.RedisError, absent: bool
) -> None:
    """A full disk must not look like a broken worker."""
    assert is_redis_unavailable(error) is absent
