"""Checks that captures are complete and undamaged when a response arrives, and after processes were
killed.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from midstream.client.sdk.client import Client
from midstream.client.sdk.wire import Answer
from midstream.schemas.base.errors import MidstreamError

from ..processes import wait_for
from .finding import CheckFinding
from .promises import judge
from .rig import BATCH, EVERY_ROW, GENTLE, OWN_TOKENS, Rig

#: Jobs that are in progress when a process is killed, their prompts, and tokens of each.
JOBS = 12
JOB_PROMPTS = 4
JOB_TOKENS = 16
RECOVERY_S = 300.0


def receipts(rig: Rig) -> Iterator[CheckFinding]:
    """Count what is missing or wrong when a held response arrives, edits by every rank included."""
    answer = rig.client.completion(
        rig.card["id"],
        rig.prompts(BATCH // 4),
        max_tokens=OWN_TOKENS,
        ignore_eos=True,
        capture=EVERY_ROW,
        capture_wait=True,
        steering=rig.steering(GENTLE),
    )
    results = answer.capture_results
    root = Path(results.root) if results and results.root and "://" not in results.root else None
    absent = sum(
        root is not None and not (root / file.path).is_file()
        for file in (results.files if results else [])
    )
    yield held(rig.client, [answer], absent, steered=True)


def held(
    client: Client, answers: Sequence[Answer], wrong: int = 0, *, steered: bool
) -> CheckFinding:
    """Judge captures of held responses: their status, the files' checksums, and ranks that
    disagree, or that edited nothing if `steered`.

    `wrong`: what is known to be wrong already. Raises MidstreamError for one without receipts.
    """
    files = 0
    rows = 0
    size = 0
    reports = []
    for answer in answers:
        results = answer.capture_results
        determinism = answer.determinism
        if results is None or determinism is None:
            raise MidstreamError("internal", "the response has no receipts")
        with client.capture(answer.job) as reader:
            checks = reader.verify()
        reports += [report for stage in determinism.stages for report in stage.ranks]
        right = [check.ok for check in checks]
        right += [determinism.consistent, results.status == "ok", bool(results.files)]
        wrong += right.count(False)
        files += len(results.files)
        rows += results.rows
        size += sum(check.bytes for check in checks)
    applied = [report.applied for report in reports]
    wrong += applied.count(0) if steered else 0
    ranks = len({report.rank for report in reports})
    return judge(
        "receipts",
        [wrong],
        f"{files} files of {len(answers)} responses, {rows} rows, {size / 2**20:.1f} MiB, CRC32 "
        f"recomputed; {len(reports)} receipts of {ranks} ranks agree, {sum(applied)} token rows "
        "edited",
    )


def durability(rig: Rig) -> Iterator[CheckFinding]:
    """Kill processes while jobs run; count the accepted jobs whose captures are not complete."""
    lost = 0
    notes = []
    for name in rig.killed:
        prompts = [rig.prompts(JOB_PROMPTS) for _ in range(JOBS)]
        ids = [rig.submit(each, JOB_TOKENS, capture=EVERY_ROW).id for each in prompts]
        rig.await_start(ids[0])
        rig.stack.kill(name)
        start = time.monotonic()
        unfinished = sum(not _finished(rig, id) for id in ids)

        def recovered(ids: list[str] = ids) -> bool:
            rig.stack.tend()
            return all(_finished(rig, id) for id in ids)

        wait_for(recovered, RECOVERY_S, step=0.1)
        intact = sum(_intact(rig, id) for id in ids)
        lost += JOBS - intact
        notes.append(
            f"{name} killed with {unfinished} of {JOBS} jobs unfinished: {intact} complete "
            f"after {time.monotonic() - start:.1f} s"
        )
    yield judge("durability", [lost], "; ".join(notes))


def _finished(rig: Rig, job: str) -> bool:
    with suppress(MidstreamError):  # such as an API that waits for Redis
        return rig.client.jobs.get(job).finished is not None
    return False


def _intact(rig: Rig, job: str) -> bool:
    """Return whether a job succeeded and all its files are present and undamaged."""
    try:
        found = rig.client.result(job).determinism
        with rig.client.capture(job) as reader:
            return bool(found and found.consistent) and all(check.ok for check in reader.verify())
    except (MidstreamError, OSError):
        return False
