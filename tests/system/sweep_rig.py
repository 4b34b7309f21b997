"""Sweeps over the fake engine, what must come out of them, and a worker with its relay in this
process.
"""

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from ledger_kit import worker_info
from midstream_fake_engine.engine import FakeEngine
from midstream_fake_engine.grades import (
    Edit,
    expected_divergence,
    expected_logprob,
    own_row,
    replaced,
)
from midstream_fake_engine.gradients import ERROR, estimate_of, is_off
from midstream_fake_engine.model import HIDDEN_SIZE, NUM_LAYERS, identity_of, make_tokenizer

from midstream.broker.ledger.jobs.ledger import Ledger, new_job_id
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.ledger.jobs.units import LedgerUnits, UnitFate
from midstream.broker.ledger.named.registry import Registry
from midstream.broker.ledger.named.steering import LedgerSteering
from midstream.broker.receipts.relay import Relay
from midstream.schemas.artifacts.conditions import Condition, Schedule
from midstream.schemas.artifacts.probes import Probe, ProbeContent
from midstream.schemas.base.records import now, to_msgpack
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.jobs.jobs import Job, Sampling
from midstream.schemas.prompts.selectors import as_ranges
from midstream.schemas.requests.policies import (
    POLICIES,
    Policy,
    PolicyAction,
    PolicyRequest,
    PolicyVersion,
)
from midstream.schemas.requests.source_runs import RunRow, row_name, run_key
from midstream.schemas.requests.specs import dims_name
from midstream.schemas.settings.settings import Settings, load_settings, values_of
from midstream.workers.serving.attempt import AttemptOutcome, JobFailed
from midstream.workers.serving.attempts import Attempts
from midstream.workers.serving.rank_watch import RankWatch
from midstream_lab.records.sweep_units import SweepWork, Units
from midstream_lab.records.sweeps import (
    Column,
    StoredPair,
    StoredSweep,
    SweepCell,
    SweepResult,
    Unit,
    UnitRecord,
)
from midstream_lab.results.ledger_sweeps import unit_row, units_key

CLEAN = "The Eiffel Tower is in"
CORRUPT = "The Colosseum  is now in"
LAYERS = list(range(NUM_LAYERS))
TOLERANCE = 1e-9


def tokens(text: str) -> list[int]:
    return list(make_tokenizer().encode(text).ids)


def columns(base: list[int], source: list[int], skipped: int = 3) -> list[Column]:
    """One for each of the first positions; one of them is skipped."""
    return [
        Column(label=f"t{place}", places=[], reason="it stands alone")
        if place == skipped
        else Column(label=f"t{place}", places=[(place, place)])
        for place in range(min(len(base), len(source)))
    ]


def pair(
    clean: str = CLEAN, corrupt: str = CORRUPT, answer: str = "P", foil: str = "R", **changes: Any
) -> StoredPair:
    base = tokens(corrupt)
    source = tokens(clean)
    fields: dict[str, Any] = {
        "base": base,
        "source": source,
        "columns": columns(base, source),
        "answer": tokens(answer),
        "foil": tokens(foil),
    }
    return StoredPair(**(fields | changes))


def sweep(*pairs: StoredPair, **changes: Any) -> StoredSweep:
    fields: dict[str, Any] = {
        "pairs": list(pairs) or [pair()],
        "hooks": ["post_block"],
        "layers": LAYERS,
        "metric": "logit_diff",
        "direction": "denoise",
        "noise": 3,
    }
    return StoredSweep(**(fields | changes))


def mask_of(asked: StoredSweep, unit: Unit) -> str:
    """The name of what a cell writes of a row; empty: all."""
    column = asked.pairs[unit.pair].columns[unit.column]
    stored = asked.pairs[unit.pair]
    if column.ranks is None:
        return dims_name(column.dims) if column.dims else ""
    hook = asked.hooks[unit.hook]
    layer = asked.layers[unit.layer]
    distance = sum(
        abs(own_row(hook, layer, to, stored.base) - own_row(hook, layer, of, stored.source))
        for to, of in column.places
    )
    chosen = np.argsort(-np.asarray(distance, np.float64), kind="stable")[
        slice(*column.ranks)
    ].tolist()
    return dims_name(as_ranges(chosen))


def cell_edits(asked: StoredSweep, units: Units, number: int, job: str = "") -> list[Edit]:
    """What the patches of a cell write, worked out here."""
    unit = units.cell(number)
    stored = asked.pairs[unit.pair]
    hook = asked.hooks[unit.hook]
    layers, places = units.patched(unit)
    found: list[Edit] = []
    if mask := mask_of(asked, unit):
        source = run_key(job, units.request(units.source(unit.pair), 0), "source")
        for (to, of), layer in itertools.product(places, layers):
            names = [row_name(RunRow(source, hook, layer, of)), mask]
            found.append(
                (hook, layer, to, to_msgpack(("replace_masked", names, [asked.alpha], 1.0)))
            )
        return found
    for layer, (to, of) in itertools.product(layers, places):
        if asked.ablation == "zeros":
            row = own_row(hook, layer, to, stored.base) * 0
        elif asked.ablation == "mean":
            rows = [
                own_row(hook, layer, position, stored.base).astype("float64")
                for position in range(len(stored.base))
            ]
            row = (sum(rows) / len(rows)).astype("float32")
        else:
            row = own_row(hook, layer, of, stored.source)
        found += replaced(hook, layer, to, stored.base, row, asked.alpha)
    return found


def answer_logprob(token_ids: list[int], edits: list[Edit], answer: list[int]) -> float:
    return sum(
        expected_logprob([*token_ids, *answer[:place]], edits, token)
        for place, token in enumerate(answer)
    )


def difference(token_ids: list[int], edits: list[Edit], stored: StoredPair) -> float:
    return answer_logprob(token_ids, edits, stored.answer) - answer_logprob(
        token_ids, edits, stored.foil
    )


def check_grid(
    asked: StoredSweep, result: SweepResult, lost: dict[int, str] | None = None, job: str = ""
) -> None:
    """Every cell has the value that its patches give, or none and the reason: those of `lost`, and
    skipped columns.
    """
    units = Units(asked)
    lost = lost or {}
    skipped = {
        (s.pair, s.hook, layer, s.column): s.reason for s in result.skipped for layer in s.layers
    }
    for number in range(units.first_cell, units.first_cell + asked.num_cells):
        unit = units.cell(number)
        stored = asked.pairs[unit.pair]
        hook = asked.hooks[unit.hook]
        value = result.pairs[unit.pair].grids[hook][unit.layer][unit.column]
        place = unit.pair, hook, asked.layers[unit.layer], unit.column
        if not stored.columns[unit.column].places:
            assert value is None
            assert skipped.pop(place) == stored.columns[unit.column].reason
            continue
        if number in lost:
            assert value is None
            assert lost[number] in skipped.pop(place)
            continue
        edits = cell_edits(asked, units, number, job)
        if asked.metric == "kl":
            clean = (
                stored.source
                if asked.direction == "denoise" and asked.ablation is None
                else stored.base
            )
            expected = expected_divergence((clean, []), (stored.base, edits))
        elif asked.metric == "logprob":
            expected = answer_logprob(stored.base, edits, stored.answer)
        else:
            expected = difference(stored.base, edits, stored)
        if asked.metric == "recovered":
            base = difference(stored.base, [], stored)
            source = difference(stored.source, [], stored)
            expected = (expected - base) / (source - base)
        assert value == pytest.approx(expected, abs=TOLERANCE), unit
    assert not skipped
    assert result.summary.cells + result.summary.skipped == result.summary.total == asked.num_cells


def sweep_job(asked: StoredSweep, model: str = "fake-model") -> Job:
    return Job(
        id=new_job_id(),
        kind="sweep",
        model=model,
        prompts=[],
        sampling=Sampling(max_tokens=1),
        created=now(),
        work=SweepWork(sweep=asked).packed,
        identity=identity_of(Settings(model=model)),
    )


def having(**settings: Any) -> pytest.MarkDecorator:
    """Settings of a test's fixture `rig`."""
    return pytest.mark.parametrize("rig", [settings], indirect=True, ids=["-".join(settings)])


class Rig:
    """A ledger, a relay and, as long as a test wants, a worker without its process: all of it real,
    and started in no time.
    """

    def __init__(self, redis_url: str, directory: Path, **settings: Any) -> None:
        client = redis.Redis.from_url(redis_url)
        chosen = {
            "redis_url": redis_url,
            "data_dir": str(directory),
            "model": "fake-model",
            "worker_id": "w1",
            "engine": "fake",
        } | settings
        served = load_settings({}, **chosen, relay_url="tcp://127.0.0.1:0")
        self._relay = Relay(Settler(client, served), served, client)
        self.settings = load_settings({}, **chosen, relay_url=self._relay.endpoint)
        self._serving = threading.Thread(target=self._relay.serve)

    async def __aenter__(self) -> "Rig":
        self._serving.start()
        self.ledger = Ledger.connect(self.settings)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.ledger.close()
        self._relay.stop()
        self._serving.join()

    @asynccontextmanager
    async def worker(self, boot: str = "boot", **settings: Any) -> AsyncIterator[Attempts]:
        """Another start of the worker, with some settings of its engine changed."""
        engine = FakeEngine(load_settings({}, **values_of(self.settings) | settings))
        await engine.start()
        worker = worker_info(model=engine.info.name, boot=boot, identity=engine.info.identity)
        await self.ledger.publish_model(engine.info, worker)
        self.engine = engine
        watch = RankWatch(LedgerSteering(self.ledger), engine, self.settings, boot, self._tell)
        try:
            await watch.start()
            yield Attempts(self.ledger, engine, watch, "w1", boot, asyncio.Event())
        finally:
            watch.close()
            await engine.shutdown()

    async def _tell(self) -> None:
        """Nobody has to know whether the worker serves."""

    async def submit(self, asked: StoredSweep) -> str:
        job = sweep_job(asked)
        await self.ledger.submit(job, {})
        return job.id

    async def run(self, asked: StoredSweep | str, boot: str = "boot", **settings: Any) -> str:
        """Have a worker run a sweep (what is asked, or the job of one that was submitted)."""
        job_id = asked if isinstance(asked, str) else await self.submit(asked)
        async with self.worker(boot, **settings) as runs:
            assert await runs.run_job(job_id) is AttemptOutcome.SUCCEEDED
        return job_id

    async def failed(self, asked: StoredSweep | str, boot: str = "boot", **settings: Any) -> str:
        """Have a worker run a sweep that fails; `asked`: as for `run`."""
        job_id = asked if isinstance(asked, str) else await self.submit(asked)
        async with self.worker(boot, **settings) as runs:
            with pytest.raises(JobFailed):
                await runs.run_job(job_id)
        return job_id

    async def watch(self, threshold: float, *actions: PolicyAction) -> None:
        """Have a policy `guard` read all traffic: the fake engine's scores are positions; without
        `actions`, it stops.
        """
        tensors = [from_numpy(np.ones(shape, np.float32)) for shape in ((1, HIDDEN_SIZE), (1,))]
        content = ProbeContent(
            hook="post_block",
            layer=1,
            tensors=[content_hash(each) for each in tensors],
            labels=["x"],
            thresholds=[threshold],
        )
        probe = Probe(
            name="guard",
            model="fake-model",
            digest=content.digest,
            content=content,
            hidden_size=HIDDEN_SIZE,
            bytes=0,
            created=now(),
        )
        content = PolicyRequest(
            probe="guard",
            condition=Condition(at_least=threshold, schedule=Schedule(tokens="all")),
            actions=[*(actions or ["stop"])],
            mode="active",
            all_traffic=True,
        )
        version = PolicyVersion(
            version=1,
            digest="digest",
            created=now(),
            content=content,
            probe=probe.stored("none"),
            modules=[],
            identity=identity_of(Settings(model="fake-model")),
            tenant="",
            key="",
        )
        policy = Policy(
            name="guard", model="fake-model", digest="digest", created=1.0, versions=[version]
        )
        await Registry(self.ledger, POLICIES).put(
            "fake-model",
            "guard",
            lambda _: policy,
            {content_hash(each): to_msgpack(each) for each in tensors},
        )

    async def known(self, job_id: str, cells: int) -> None:
        """Until so many cells are."""
        while (await self.ledger.view(job_id)).cells < cells:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def interrupted(self, asked: StoredSweep, cells: int, **enters: bool) -> str:
        """Submit a sweep and release it once so many cells are known; `enters`: an attribute of its
        engine.
        """
        job_id = await self.submit(asked)
        async with self.worker(engine_options={"token_s": 0.01}) as runs:
            for name, value in enters.items():
                setattr(self.engine, name, value)
            running = asyncio.create_task(runs.run_job(job_id))
            await self.known(job_id, cells)
            runs.stop([job_id], AttemptOutcome.RELEASED)
            assert await running is AttemptOutcome.RELEASED
        return job_id

    async def result(self, job_id: str) -> SweepResult:
        result = (await self.ledger.result(job_id)).sweep
        assert result is not None
        return result

    async def records(self, job_id: str) -> dict[int, UnitRecord]:
        return await records_of(self.ledger, job_id)


async def records_of(ledger: Ledger, job_id: str) -> dict[int, UnitRecord]:
    return await LedgerUnits(ledger).records(units_key(job_id), UnitRecord)


async def keep(
    ledger: Ledger,
    job: Job,
    attempt: int,
    *units: tuple[UnitRecord, SweepCell | None],
    ranks: int = 2,
) -> UnitFate:
    """Keep units as a worker does that has so many ranks in one stage."""
    rows = [unit_row(job, attempt, record, shown) for record, shown in units]
    place = units_key(job.id)
    return await LedgerUnits(ledger).keep(job.id, attempt, rows, place=place, ranks=ranks, stages=1)


def check_attribution(result: Any, asked: StoredSweep, weights: int = 0) -> None:
    """The estimates are those of the fake engine, and every chosen cell has its exact value."""
    assert (verify := asked.attributed.verify) is not None
    units = Units(asked)
    for number, (found, exact) in enumerate(zip(result.estimated, result.pairs, strict=True)):
        estimate = estimate_of(asked, number, weights)
        assert found.estimates == {
            "post_block": [
                estimate.values[start : start + asked.num_columns]
                for start in range(0, asked.cells_of_pair, asked.num_columns)
            ]
        }
        known = {
            (cell.layer, cell.column): cell.exact
            for cell in found.checked
            if cell.exact is not None
        }
        assert len(known) == len(found.checked) > 0
        whys = Counter(why for cell in found.checked for why in cell.why)
        assert whys["top"] == verify.top
        assert whys["random"] == verify.random
        for place, unit in enumerate(units.cells(number)):
            value = exact.grids["post_block"][unit.layer][unit.column]
            at = asked.layers[unit.layer], unit.column
            assert (value is None) == (at not in known)
            if value is not None:
                expected = (estimate.values[place] or 0.0) - ERROR * is_off(place)
                assert value == known[at] == pytest.approx(expected, abs=TOLERANCE)
        for cell in found.checked:
            place = cell.layer * asked.num_columns + cell.column
            assert cell.off == is_off(place)
