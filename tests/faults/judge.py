"""What became of every job in the end, by the ledger, the event streams and the files?

Each rule names who broke it.

Lost: a job whose client received its acceptance, and that did not succeed (or was not cancelled
where that was asked for). Duplicate effect: two jobs for one Idempotency-Key; more than one result,
end, or set of files for a job; an event that occurs twice; files or receipts of another attempt
than the one that gave the result; an output or a row that is not what the deterministic engine
gives.
"""

import asyncio
import sys
import time
import traceback
import zlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import redis
from clients import DOSE, EVERYONE, MODEL, POLICIES, TERMINAL, Observed
from cluster import MODELS
from harvest_kit import check_rows, checked
from midstream_fake_engine.model import Dice, identity_of, make_tokenizer, residual_rows, weights_of
from monitor import Monitor
from receiver import Receiver
from sweep_rig import check_attribution
from tokenizers import Tokenizer

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.named.registry import Registry
from midstream.schemas.access.keys import DEFAULT_TENANT
from midstream.schemas.artifacts.conditions import Condition, StoredPolicy
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import Event, FileEntry, Job, JobView, State
from midstream.schemas.jobs.results import JobResult
from midstream.schemas.prompts.selectors import Span
from midstream.schemas.requests.steering import MODULES
from midstream.schemas.settings.settings import Settings
from midstream.storage.formats.capture_blobs import read_header
from midstream.storage.store import ArtifactStore, open_store
from midstream_harvest.ledger.harvests import LedgerHarvests
from midstream_harvest.records.harvests import HarvestWork
from midstream_lab.records.doses import DoseWork
from midstream_lab.records.fits import FitWork
from midstream_lab.records.sweep_units import SweepWork
from midstream_webhooks.outbox import WebhookOutbox


def decisions_of(
    scores: Sequence[float], condition: Condition, prompt_tokens: int
) -> list[tuple[str, int, float]]:
    """Decide each position from the list of all scheduled scores up to it."""
    schedule = condition.schedule
    result: list[tuple[str, int, float]] = []
    first = schedule.start + (prompt_tokens if schedule.tokens == "generated" else 0)
    last = first - schedule.start + schedule.stop if schedule.stop is not None else len(scores)
    on = False
    off_at = sys.maxsize
    for position in range(len(scores)):
        seen = [scores[p] for p in range(first, min(position + 1, last), schedule.every)]
        if position not in range(first, last, schedule.every):
            continue
        recent = seen[-(condition.window or len(seen)) :]
        if condition.aggregation == "exponential":
            value = seen[0]
            for score in seen[1:]:
                value = condition.decay * value + (1 - condition.decay) * score
        else:
            value = {"last": seen[-1], "max": max(recent), "mean": sum(recent) / len(recent)}[
                condition.aggregation
            ]
        below = condition.at_least if condition.release_below is None else condition.release_below
        cooling = off_at < position <= off_at + condition.cool_down
        if not on and value >= condition.at_least and not cooling:
            on = True
            result.append(("trigger", position, value))
        elif on and value < below and condition.latch == "none":
            on = False
            off_at = position
            result.append(("release", position, value))
    return result


#: Jobs that are looked at together.
AT_ONCE = 32
MAY_END = {
    way: {State.CANCELLED, State.ABORTED, State.SUCCEEDED}
    for way in ("cancelled job", "cancelled attribution")
}
#: How long a latch stands; and how near to its ends a claim may have come before or after them.
LATCH_MS = 1000 * POLICIES["latch"]["condition"]["latch_s"]
EDGE_MS = 20
#: The event of a first claim.
RUNNING = {"state": "running", "attempt": 1}
#: Events that a job has once, whatever its attempts; and those that an attempt has once.
ONCE_OF_JOB = {"estimate", "cell"}
ONCE_OF_ATTEMPT = {"start", "fit", "output", "receipt"}


class Verdict:
    """`found[rule]`: who broke it, in words; `seen`: counts worth telling."""

    RULES = (
        "lost",
        "duplicate",
        "wrong answer",
        "unresolved",
        "terminal changed",
        "webhook",
        "left over",
    )

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {rule: [] for rule in self.RULES}
        self.seen: Counter[str] = Counter()

    def say(self, rule: str, *texts: str, of: str = "") -> None:
        """`of`: what breaks the rule, in front of each text."""
        self.found[rule] += [f"{of}: {text}" if of else text for text in texts]

    @property
    def clean(self) -> bool:
        return not any(self.found.values())


async def judge(
    settings: Settings,
    observed: list[Observed],
    monitor: Monitor,
    receiver: Receiver,
    verdict: Verdict,
) -> None:
    """Everything that can be asked of the ledger and of the disk once the load is over."""
    await judge_jobs(settings, observed, verdict)
    ledger = Ledger.connect(settings)
    try:
        await _ends(ledger, observed, monitor, verdict)
        await _webhooks(ledger, observed, receiver, verdict)
    finally:
        await ledger.close()


async def judge_jobs(settings: Settings, observed: list[Observed], verdict: Verdict) -> None:
    """Every job, its results and its files, and that nothing is left over: all but what readers and
    receivers saw meanwhile.
    """
    ledger = Ledger.connect(settings)
    try:
        await _accounts(ledger, observed, verdict)
        tokenizer = make_tokenizer()
        gate = asyncio.Semaphore(AT_ONCE)
        store = open_store(settings.artifacts)

        async def one(client: Observed) -> None:
            async with gate:
                await _job(ledger, tokenizer, store, client, verdict)

        await asyncio.gather(
            *[one(client) for client in observed if client.ids and client.plan.way != "harvest"]
        )
        for client in observed:
            if client.ids and client.plan.way == "harvest":
                await _harvest(ledger, client, verdict)
        await _modules(ledger, observed, verdict)
        await _latches(ledger, observed, verdict)
        await _left_over(ledger, verdict)
    finally:
        await ledger.close()


async def _accounts(ledger: Ledger, observed: list[Observed], verdict: Verdict) -> None:
    """Every accepted job is there once, and nobody's is there."""
    known = {
        raw.decode()
        for name in ("ms:jobs", "ms:harvests")
        for raw in await ledger.redis.zrange(name, 0, -1)
    }
    for client in observed:
        of = f"job {client.plan.number} ({client.plan.way}, {client.id})"
        verdict.say("unresolved", *client.wrong, of=of)
        if len(client.ids) > 1:
            verdict.say("duplicate", f"key {client.key} has the jobs {', '.join(client.ids)}")
        for job in client.ids:
            if job not in known:
                verdict.say("lost", f"{job} was accepted and is not in the ledger")
        if not client.ids:
            verdict.say(
                "unresolved", f"job {client.plan.number} was never accepted: {dict(client.answers)}"
            )
    own = {job for client in observed for job in client.ids}
    for name in known - own:
        job = await ledger.job(name)
        if not isinstance(job.opened, HarvestWork) or job.opened.part.harvest not in own:
            verdict.say("duplicate", f"{name} is in the ledger, and no client received its id")
    verdict.seen["jobs"] = len(known)


async def _job(
    ledger: Ledger, tokenizer: Tokenizer, store: ArtifactStore, client: Observed, verdict: Verdict
) -> None:
    try:
        job = await ledger.job(client.id)
        result = await ledger.result(client.id)
    except MidstreamError as error:
        when = time.strftime(
            "%H:%M:%S", time.localtime(time.time() - time.monotonic() + client.accepted)
        )
        verdict.say(
            "lost",
            (
                f"{client.id} ({client.plan.way}), accepted at {when}, last seen as "
                f"{client.state!r}: {error.detail}"
            ),
        )
        return
    view = await ledger.view(client.id)
    events = [event async for event in _events(ledger, client.id)]
    verdict.seen[view.state] += 1
    verdict.seen["attempts"] += view.attempt
    verdict.seen["other weights"] += _weights(job.identity) != 0
    handed_on = view.queue != job.queue  # which takes an attempt of each kind of worker
    verdict.seen["again"] += view.attempt > 1 + handed_on
    if view.state not in MAY_END.get(client.plan.way, {State.SUCCEEDED}):
        verdict.say(
            "lost",
            (
                f"{job.id} ({client.plan.way}) ended {view.state}: "
                f"{view.error.detail if view.error else ''}"
            ),
        )
    if (
        client.state in TERMINAL and client.state != view.state
    ):  # a client that gave up may have received `queued` last
        verdict.say(
            "terminal changed",
            f"{job.id}: its client received {client.state}, the ledger has {view.state}",
        )
    verdict.say("duplicate", *_history(events, view.state, view.attempt), of=job.id)
    verdict.say("duplicate", *_said_twice(events), of=job.id)
    if view.state is not State.SUCCEEDED:
        return
    if view.receipts != view.receipts_expected:
        verdict.say(
            "duplicate", f"{job.id} has {view.receipts} receipts of {view.receipts_expected}"
        )
    if judged := RESULTS.get(job.kind):
        verdict.seen[f"{job.kind}s"] += 1
        verdict.seen[f"{job.kind}s again"] += view.attempt > 1 + handed_on
        found = judged(job, result)
    else:
        judged_by = _outputs
        if job.kind == "dose":
            verdict.seen["doses"] += 1
            judged_by = _dose
        found = judged_by(tokenizer, job, result, client)
    verdict.say("wrong answer", *found, of=f"{job.id} ({client.plan.way})")
    decided = _decided(tokenizer, job, result, events, client, verdict)
    verdict.say("wrong answer", *decided, of=f"{job.id} in conversation {job.conversation}")
    verdict.say("duplicate", *_kept(job, view, events), of=job.id)
    if job.stream:
        verdict.say("duplicate", *_streamed(events, result), of=job.id)
    captures = await asyncio.to_thread(list, _captures(store, job, result, verdict))
    verdict.say("duplicate", *captures, of=job.id)


async def _harvest(ledger: Ledger, client: Observed, verdict: Verdict) -> None:
    """Every token of every document has its row at both layers once, in the order of its seed, bit
    for bit what the engine gives.
    """
    view = await LedgerHarvests(ledger).view(client.id)
    verdict.seen["harvests"] += 1
    if client.paused:
        verdict.seen["harvests paused"] += 1
    if (
        client.plan.rewrite
        and view.state == "failed"
        and view.error
        and client.plan.file in view.error.detail
    ):
        verdict.seen["changed sources"] += 1
        return
    if view.state != "succeeded":
        verdict.say(
            "lost",
            (
                f"{client.id} ended {view.state} ({view.reason}): "
                f"{view.error.detail if view.error else ''}"
            ),
        )
        return
    documents = list(client.plan.prompts)
    try:
        made = await asyncio.to_thread(checked, view.uri)
        if made.manifest.identity != view.identity:
            raise AssertionError(
                f"its manifest names the model {made.manifest.identity}, the harvest "
                f"{view.identity}"
            )
        await asyncio.to_thread(
            check_rows, made, documents, client.plan.sites, _weights(view.identity)
        )
    except (AssertionError, MidstreamError, OSError) as error:
        verdict.say("duplicate", f"{client.id} at {view.uri}: {str(error)[:500]}")
    else:
        if (view.rows, view.bytes, view.documents) != (
            len(made),
            made.manifest.bytes,
            len(documents),
        ):
            verdict.say(
                "wrong answer",
                (
                    f"{client.id} counts {view.rows} rows of {view.documents} documents, and has "
                    f"{len(made)}"
                ),
            )
        verdict.seen["rows"] += len(made)


def _weights(identity: str) -> int:
    """The weights of the model of this identity: those that the job was accepted for decide its
    numbers.
    """
    return next(
        weights_of(settings)
        for settings in (Settings(model=model) for model in MODELS)
        if identity_of(settings) == identity
    )


async def _events(ledger: Ledger, job: str) -> AsyncIterator[Event]:
    after = "0-0"
    while batch := await ledger.events(job, after, 1000):
        for event in batch:
            yield event
        after = batch[-1].id


def _history(events: list[Event], state: State, attempt: int) -> Iterator[str]:
    """One end, said once and last; an attempt begins once; after it has, no earlier one is heard
    of.
    """
    moves = [(event.data["state"], event.attempt) for event in events if event.event == "state"]
    ends = [name for name, _ in moves if name in ("succeeded", "failed", "cancelled", "aborted")]
    if ends != [state]:
        yield f"its history has the ends {ends}, its state is {state}"
    if sum(event.event == "done" for event in events) != 1 or events[-1].event != "done":
        yield "its history does not end with one `done`"
    begun = [number for name, number in moves if name == "running"]
    if begun != list(range(1, attempt + 1)):
        yield f"its attempts began as {begun}, and there were {attempt}"
    spoken = [event.attempt for event in events]
    if spoken != sorted(spoken):
        yield f"an attempt that was over went on to say something: {spoken}"


def _said_twice(events: list[Event]) -> Iterator[str]:
    """Outputs, receipts, cells and estimates that were reported more than once.

    Two tokens may be alike: see `_streamed`.
    """
    once = Counter(
        (event.event, 0 if event.event in ONCE_OF_JOB else event.attempt, str(event.data))
        for event in events
        if event.event in ONCE_OF_JOB | ONCE_OF_ATTEMPT
    )
    for (name, attempt, data), count in once.items():
        if count > 1:
            yield f"attempt {attempt} reported the {name} {data} {count} times"


def _streamed(events: list[Event], result: JobResult) -> Iterator[str]:
    """The streamed tokens are those that are stored, each once.

    (Its text is judged by what its client received.)
    """
    streamed: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if event.event == "token" and event.attempt == result.attempt:
            streamed[event.data["index"]] += event.data["token_ids"]
    for output in result.outputs:
        if streamed[output.index] != output.token_ids:
            yield (
                f"prompt {output.index} was streamed as {streamed[output.index]}, stored is "
                f"{output.token_ids}"
            )


def _outputs(tokenizer: Tokenizer, job: Job, result: JobResult, client: Observed) -> Iterator[str]:
    """What the fake engine gives for these prompts, and what the client received is what is
    stored.
    """
    for number in range(len(job.prompts)):
        wanted = tokenizer.decode(_generated(tokenizer, job, number))
        stored = [output.text for output in result.outputs if output.index == number]
        if stored != [wanted]:
            yield f"prompt {number} gave {stored}, not {wanted!r}"
        if client.texts is not None and client.texts[number] != wanted:
            yield (
                f"its client received {client.texts[number]!r} for prompt {number}, not {wanted!r}"
            )
    if len(result.outputs) != len(job.prompts):
        yield f"{len(result.outputs)} outputs of {len(job.prompts)} prompts"


def _generated(tokenizer: Tokenizer, job: Job, number: int) -> list[int]:
    """The tokens that the fake engine gives for a prompt."""
    steering = job.steering[number] if job.steering else []
    prompt = job.prompts[number].token_ids
    dice = Dice(tokenizer, prompt, job.sampling.seed, steering, _weights(job.identity))
    continued = job.opened.continues(number)
    return [dice.roll() for _ in range(job.sampling.max_tokens if continued else 1)]


def _dose(tokenizer: Tokenizer, job: Job, result: JobResult, _: Observed) -> Iterator[str]:
    """The first cell is not steered, the other one by the scale of the dose."""
    dose = job.work_as(DoseWork).dose
    assert result.dose is not None
    scales = [sorted({entry.scale for entry in entries}) for entries in job.steering]
    if scales != [[]] * dose.requests + [DOSE["scales"]] * dose.requests:
        yield f"its prompts are steered at the scales {scales}"
    for cell, found in enumerate((result.dose.unsteered, *result.dose.cells)):
        wanted = tokenizer.decode(_generated(tokenizer, job, cell * dose.requests))
        if found.text != wanted:
            yield f"cell {cell} gave {found.text!r}, not {wanted!r}"


def _at(event: Event) -> int:
    """When it was recorded, in ms of Redis' clock."""
    return int(event.id.partition("-")[0])


def _decided(
    tokenizer: Tokenizer,
    job: Job,
    result: JobResult,
    events: list[Event],
    client: Observed,
    verdict: Verdict,
) -> Iterator[str]:
    """Each policy decided once about each prompt, as its tokens say; where the latch of the
    conversation had turned it on, there was nothing to decide.
    """
    if isinstance(job.opened, SweepWork | FitWork):
        return
    found = [(each.request, each.policy and each.policy.name) for each in result.probes]
    names = list(POLICIES) if job.conversation else []
    if client.plan.watched:
        names.append("everyone")
    if sorted(found) != sorted(
        (place, name) for place in range(len(job.prompts)) for name in names
    ):
        yield f"decisions of {found}"
        return
    for scores in result.probes:
        policy = scores.policy
        request = scores.request
        prompt = job.prompts[request].token_ids
        fed = [*prompt, *_generated(tokenizer, job, request)[:-1]]
        own = decisions_of(fed, policy.condition, len(prompt))
        wanted = [] if policy.inherited else own
        asked = {**POLICIES, "everyone": EVERYONE}[policy.name]
        acts = asked.get("mode") == "active"
        on = bool(wanted or policy.inherited)
        decided = [(each.event, each.position, each.score) for each in scores.decisions]
        flagged = acts and on and "flag" in asked["actions"]
        if (decided, policy.acts, scores.flagged) != (wanted, acts, flagged):
            yield f"{policy.name} decided {decided} on prompt {request}, not {wanted}"
        verdict.seen["decisions"] += len(decided)
        if policy.name == "latch":
            settled = {"request": request, "rank": 0, "status": "ok"}
            client.claimed = min(_at(each) for each in events if each.data == RUNNING)
            client.triggers += [_at(each) for each in events if wanted and each.data == settled]
            client.inherited.add(policy.inherited)
        elif policy.inherited:
            yield f"{policy.name}, which has no latch or does not act, inherited one"
        if acts and on and asked is not EVERYONE:
            hook = f"msg_{job.id.removeprefix('job_')}_decided_{policy.name}_{request}_policy"
            client.decided[hook] = _hook(policy, request, wanted)


def _hook(
    policy: StoredPolicy, request: int, decisions: list[tuple[str, int, float]]
) -> dict[str, Any]:
    """What a webhook says of these decisions."""
    triggers = [
        {"position": position, "event": event, "score": score}
        for event, position, score in decisions
        if event == "trigger"
    ]
    return {
        "policy": policy.name,
        "version": policy.version,
        "digest": policy.digest,
        "inherited": policy.inherited,
        "request": request,
        "triggers": len(triggers),
        "first": triggers[0] if triggers else None,
    }


def _kept(job: Job, view: JobView, events: list[Event]) -> Iterator[str]:
    """Every cell that was to be computed, and every estimate, was reported once."""
    if not isinstance(job.opened, SweepWork):
        return
    kinds = Counter(event.event for event in events)
    estimates = 0 if job.opened.sweep.attributed is None else len(job.opened.sweep.pairs)
    found = kinds["estimate"], kinds["cell"], view.cells
    if found != (estimates, view.cells_expected, view.cells_expected):
        yield (
            f"{found} estimates, cells in its events and cells; there should be {estimates} and "
            f"{view.cells_expected}"
        )


def _attribution(job: Job, result: JobResult) -> Iterator[str]:
    """Both phases: all estimates, and the exact values of all chosen cells."""
    try:
        check_attribution(result.attribution, job.work_as(SweepWork).sweep, _weights(job.identity))
    except AssertionError as error:
        yield f"not so: {traceback.extract_tb(error.__traceback__)[-1].line} {error}"[:500]


def _sweep(_: Job, result: JobResult) -> Iterator[str]:
    summary = result.sweep.summary
    if summary.cells != summary.total:
        yield (
            f"{summary.cells} cells of {summary.total}, {summary.skipped} skipped: "
            f"{result.sweep.skipped[:2]}"
        )


#: Kind of job → what is wrong with its result; the others have outputs.
RESULTS = {"sweep": _sweep, "attribution": _attribution, "fit": lambda *_: iter(())}


async def _modules(ledger: Ledger, observed: list[Observed], verdict: Verdict) -> None:
    """Every fit registered its module, no other did, and the same fit learned the same numbers."""
    registered = {module.name: module for module in await Registry(ledger, MODULES).of_model(MODEL)}
    digests: dict[int, set[str]] = defaultdict(set)
    for client in observed:
        if client.plan.way != "fit":
            continue
        wanted = client.plan.body()
        if client.state != "succeeded":
            if client.state not in TERMINAL:  # it was given up, which another rule says
                registered.pop(wanted["name"], None)
            continue
        module = registered.pop(wanted["name"], None)
        if module is None or module.training is None or module.training.job != client.id:
            learned = module and module.training and module.training.job
            verdict.say("lost", f"{client.id} succeeded; its module is of the job {learned}")
            continue
        digests[wanted["seed"]].add(module.digest)
    for seed, found in digests.items():
        if len(found) > 1:
            verdict.say("wrong answer", f"fits with the seed {seed} learned {found}")
    for name in registered:
        verdict.say("duplicate", f"module {name} is registered, and no fit learned it")


async def _latches(ledger: Ledger, observed: list[Observed], verdict: Verdict) -> None:
    """A job found, at its first claim, the latch of its conversation that stood then: set by a
    trigger, for `latch_s` seconds. No latch stays for good.
    """
    by_conversation: dict[str, list[Observed]] = defaultdict(list)
    for client in observed:
        if client.plan.conversation and client.state == "succeeded":
            by_conversation[client.plan.conversation].append(client)
    for conversation, clients in by_conversation.items():
        spans = standing([(at, client.id) for client in clients for at in client.triggers])
        verdict.seen["latches"] += len(spans)
        again = [(await ledger.view(min(jobs))).attempt > 1 for _, jobs in spans]
        verdict.seen["latches again"] += sum(again)
        for client in clients:
            if not any(client.inherited == {found} for found in found_at(client.claimed, spans)):
                verdict.say(
                    "wrong answer",
                    f"{client.id} in conversation {conversation} found the latches of "
                    f"{client.inherited} at {client.claimed}; those that stood: {spans}",
                )
            verdict.seen["latched"] += client.inherited != {""}
    async for key in ledger.redis.scan_iter(match="ms:latch:*"):
        if not 0 < await ledger.redis.pttl(key) <= LATCH_MS:
            verdict.say("left over", f"{key} does not expire in time")


def standing(triggers: list[tuple[int, str]]) -> list[tuple[int, set[str]]]:
    """When a latch was set, because none stood, and the jobs that may have set it: receipts of one
    commit have one time, and no order between jobs.
    """
    spans: list[tuple[int, set[str]]] = []
    for at, job in sorted(triggers):
        if not spans or at > spans[-1][0] + LATCH_MS:
            spans.append((at, {job}))
        elif at <= spans[-1][0] + EDGE_MS:
            spans[-1][1].add(job)
    return spans


def found_at(at: int, spans: list[tuple[int, set[str]]]) -> set[str]:
    """What a claim at this time may have found: a holder, or nothing; either, at the edges."""
    near = {start: jobs for start, jobs in spans if -EDGE_MS <= at - start <= LATCH_MS + EDGE_MS}
    sure = any(EDGE_MS < at - start < LATCH_MS - EDGE_MS for start in near)
    return set().union(*near.values(), () if sure else {""})


def _captures(store: ArtifactStore, job: Job, result: JobResult, verdict: Verdict) -> Iterator[str]:
    """One blob for each captured prompt, of the attempt that gave the result, whole, with the rows
    of that prompt.
    """
    by_request: dict[int, list[FileEntry]] = defaultdict(list)
    for file in result.capture_results.files:
        by_request[file.request].append(file)
    wanted = (
        [number for number, captures in enumerate(job.captures) if captures]
        if not isinstance(job.opened, SweepWork)
        else []
    )
    if not isinstance(job.opened, SweepWork) and sorted(by_request) != wanted:
        yield f"captures of prompts {sorted(by_request)}, wanted of {wanted}"
    outputs = {output.index: output for output in result.outputs}
    if any(capture.window for each in job.captures for capture in each):
        verdict.seen["windows"] += 1
    for number, files in by_request.items():
        if len(files) != 1:
            yield f"{len(files)} blobs of prompt {number}"
        for file in files:
            verdict.seen["blobs"] += 1
            wrong = _blob(
                store,
                job,
                result.attempt,
                file,
                outputs[number].token_ids if number in outputs else None,
            )
            if wrong:
                yield f"{file.path} + {file.offset}: {wrong}"


def _blob(
    store: ArtifactStore, job: Job, attempt: int, file: FileEntry, generated: list[int] | None
) -> str:
    """Why the blob is not what its receipt says; empty when it is."""
    with store.open(file.path) as source:
        raw = source.read(file.offset, file.bytes)
    if zlib.crc32(raw) != file.crc32:
        return f"CRC {zlib.crc32(raw):08x}, the receipt says {file.crc32:08x}"
    header = read_header(lambda start, length: raw[start : start + length], len(raw))
    manifest = header.manifest
    if (manifest.job, manifest.request) != (job.id, file.request):
        return f"it is of {manifest.job}, prompt {manifest.request}"
    if not isinstance(job.opened, SweepWork) and manifest.attempt != attempt:
        return f"it is of attempt {manifest.attempt}, the result is of {attempt}"
    if generated is not None:
        tokens = [*job.prompts[file.request].token_ids, *generated[:-1]]
        window = job.captures[file.request][0].window
        positions = range(len(tokens)) if window is None else _around(window, tokens)
        if manifest.positions != [*positions]:
            return f"it has the positions {manifest.positions}"
        if manifest.token_ids != [tokens[position] for position in positions]:
            return "its tokens are not the prompt's and the output's"
    positions = np.array(manifest.positions)
    tokens = np.array(manifest.token_ids)
    for tensor in header.tensors.values():
        if tensor.site is not None:
            hook, layer = tensor.site
            rows = np.frombuffer(
                raw[tensor.start : tensor.start + tensor.length], dtype="<f4"
            ).reshape(tensor.shape)
            if not np.array_equal(
                rows, residual_rows(layer, positions, tokens, hook, _weights(job.identity))
            ):
                return f"rows of {tensor.name} are wrong"
    return ""


def _around(window: Span, tokens: list[int]) -> list[int]:
    """The positions of all occurrences of what the window is around."""
    assert window.around is not None
    sought = [list(sequence) for sequence in window.around.token_ids or ()]
    return [
        position
        for position in range(len(tokens))
        if any(
            tokens[first : first + len(each)] == each
            for each in sought
            for first in range(max(0, position - len(each) + 1), position + 1)
        )
    ]


async def _ends(
    ledger: Ledger, observed: list[Observed], monitor: Monitor, verdict: Verdict
) -> None:
    """Every end that anybody saw is the end."""

    def again() -> None:
        with redis.Redis.from_url(ledger.settings.redis_url) as connection:
            monitor.look(connection, [job for client in observed for job in client.ids])

    await asyncio.to_thread(again)
    verdict.say("terminal changed", *monitor.changed)
    verdict.seen["ends seen"] = len(monitor.ends)


async def _webhooks(
    ledger: Ledger, observed: list[Observed], receiver: Receiver, verdict: Verdict
) -> None:
    """Each requested end of a job, and each decision of a policy that acts, was delivered, under
    one id, and nothing else was.
    """
    verdict.say("webhook", *receiver.wrong)
    wanted = {
        client.id: client
        for client in observed
        if client.id and (client.plan.callback or client.decided)
    }
    unsent = 0
    for job, client in wanted.items():
        end = f"job.{(await ledger.view(job)).state}"
        delivered = {event: len(names) for event, names in receiver.delivered[job].items()}
        asked = {end: 1} if client.plan.callback else {}
        for hook, body in client.decided.items():
            said = receiver.decided.get(hook)
            if said is None:
                unsent += 1
            elif said != body:
                verdict.say("webhook", f"{hook} said {said}, not {body}")
        if sent := len(client.decided.keys() & receiver.decided.keys()):
            asked["job.decided"] = sent
        if delivered != asked:
            verdict.say(
                "webhook",
                (
                    f"{job} ({client.plan.way}) ended as {end}; event -> ids "
                    "of what was delivered: "
                    f"{delivered}"
                ),
            )
    counted = await WebhookOutbox(ledger).dropped()
    if unsent > counted:
        verdict.say("webhook", f"{unsent} decisions were not sent, and {counted} are counted")
    for job in receiver.delivered.keys() - wanted.keys():
        verdict.say("webhook", f"{job}: a webhook was delivered that no client had requested")
    verdict.seen["webhooks"] = len(receiver.got)
    verdict.seen["webhooks of decisions"] = len(receiver.decided)
    verdict.seen["webhooks sent again"] = receiver.got.total() - len(receiver.got)
    verdict.seen["webhooks while away"] = receiver.refused


async def _left_over(ledger: Ledger, verdict: Verdict) -> None:
    """Nothing of a job that is over keeps anything busy."""
    if live := await ledger.redis.zcard("ms:live"):
        verdict.say("left over", f"{live} jobs are looked after, and all are over")
    async for name in ledger.redis.scan_iter(match="ms:held:*"):
        verdict.say(
            "left over",
            f"{name.decode()} has {await ledger.redis.scard(name)} jobs, and all are over",
        )
    for kind in ("sent", "wait"):
        async for name in ledger.redis.scan_iter(match=f"ms:{kind}:*"):
            verdict.say(
                "left over",
                (
                    f"{name.decode()} is not empty: a place in the window, or "
                    "a turn, of a job that "
                    "is over"
                ),
            )
    usage = {
        name.decode(): int(number)
        for name, number in (await ledger.redis.hgetall("ms:usage")).items()
    }
    for name, number in usage.items():
        if number and not name.endswith("/bytes"):
            verdict.say("left over", f"{number} of {name} are counted as used, and nothing runs")
    if still := await LedgerHarvests(ledger).live():
        verdict.say("left over", f"harvests {still} are looked after, and all are over")
    captured = [
        name
        for kind in ("capture", "harvest")
        async for name in ledger.redis.scan_iter(match=f"ms:{kind}:*")
    ]
    async with ledger.redis.pipeline(transaction=False) as pipe:
        for name in captured:
            pipe.hget(name, "bytes")
        held = sum(int(number or 0) for number in await pipe.execute())
    if held != usage.get(f"{DEFAULT_TENANT}/bytes", 0):
        counted = usage.get(f"{DEFAULT_TENANT}/bytes", 0)
        verdict.say(
            "left over",
            f"{counted} bytes of captures and harvests are counted, and there are {held}",
        )
