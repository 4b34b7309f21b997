"""Does every family do on the real engine what its formula says, at every hook, and nothing where
it has nothing to do?

v1 runner, eager, fp32. What each formula means is tested with the kernels.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
from host import Host, capture_of, prompt_of, relative_error
from reference import Edit, Reference
from tiny import HIDDEN, LAYERS
from tolerances import FP32_LOGPROBS, FP32_ROWS

from midstream.schemas.prompts.selectors import HOOKS, STREAM_HOOKS

ALL = list(range(LAYERS))
PROMPT = 20
RNG = np.random.default_rng(11)
V = RNG.normal(size=HIDDEN).astype(np.float32)
# orthonormal rows, as LoReFT trains it
ROTATION = np.linalg.qr(RNG.normal(size=(HIDDEN, 3)))[0].T.astype(np.float32)
WEIGHT = (RNG.normal(size=(3, HIDDEN)) / np.sqrt(HIDDEN)).astype(np.float32)
BIAS = RNG.normal(size=3).astype(np.float32)

#: Family → one of it at layer 1.
FAMILIES: dict[str, Edit] = {
    "replace": Edit(1, V, op="replace", alpha=0.25, scale=3.0),
    "lowrank": Edit(1, op="lowrank", rotation=ROTATION, weight=WEIGHT, bias=BIAS, strength=0.75),
    "add": Edit(1, V, op="add", scale=-1.5),
    "add_matched": Edit(1, V, op="add", scale=0.3, norm_match=True),
    "ablate": Edit(1, V, op="ablate"),
    "clamp": Edit(1, V, op="clamp", low=-0.25, high=0.5),
}
PLACES = {
    f"{family} {hook}": edit._replace(hook=hook)
    for family, edit in FAMILIES.items()
    for hook in HOOKS
    if family != "add_matched" or hook in STREAM_HOOKS
}


@dataclass(frozen=True)
class Trial:
    """One request's captured rows, before and after the edits of the same place."""

    tokens: list[int]
    before: dict[tuple[str, int], np.ndarray]
    after: dict[tuple[str, int], np.ndarray]
    logprobs: list[float]  # of the generated tokens
    applied: int


def trials(
    host: Host, wanted: dict[str, list[Edit]], max_tokens: int = 4, same_prompt: bool = False
) -> dict[str, Trial]:
    """One batch; name → what came of a request with these edits."""
    sites = {hook: ALL for hook in host.info["hooks"] if hook in HOOKS}
    captures = [capture_of([], "all", at, sites=sites, at=at) for at in ("before", "after")]
    jobs = {
        name: host.job(
            prompt_of(PROMPT, seed=0 if same_prompt else number),
            max_tokens=max_tokens,
            capture=captures,
            steering=host.steering(*edits),
            logprobs=0,
        )
        for number, (name, edits) in enumerate(wanted.items())
    }
    answers = host.run(*jobs.values())
    found = {}
    for name, job in jobs.items():
        output = answers[job.id][0]
        readers = [host.capture(job, number) for number in (0, 1)]
        before, after = (
            {(hook, layer): reader.array(layer, hook) for hook in sites for layer in ALL}
            for reader in readers
        )
        logprobs = [each.logprob for each in output.logprobs or []]
        found[name] = Trial(
            job.prompts[0].token_ids + output.token_ids,
            before,
            after,
            logprobs,
            host.receipts(job)[0].applied,
        )
    return found


def worst(found: Trial, reference: Reference, edits: list[Edit]) -> float:
    """The largest error of any row, before and after its edits, relative to the row's length."""
    errors = []
    for at, rows in (("before", found.before), ("after", found.after)):
        wanted = reference.rows(found.tokens[:-1], edits, at)
        errors += [relative_error(values, wanted[place]) for place, values in rows.items()]
    return max(errors)


# field case 3, field case 10
def test_every_family_at_every_hook_gives_the_reference_rows(
    v1: Host, reference: Reference
) -> None:
    """There and downstream: a request for each family and hook, all in one batch."""
    found = trials(v1, {place: [edit] for place, edit in PLACES.items()})
    for place, edit in PLACES.items():
        trial = found[place]
        assert worst(trial, reference, [edit]) <= FP32_ROWS, place
        plain = reference.rows(trial.tokens[:-1], [], "after")
        moved = np.linalg.norm(
            trial.after[edit.hook, 1] - plain[edit.hook, 1], axis=-1
        ) / np.linalg.norm(plain[edit.hook, 1], axis=-1)
        touched = moved > 0.01
        # A clamp leaves rows alone whose component is inside its range.
        assert touched.any() if edit.op == "clamp" else touched.mean() > 0.8, place
        assert relative_error(trial.before["post_block", 3], plain["post_block", 3]) > 0.01


def test_steering_phases_are_prompt_or_generated(v1: Host, reference: Reference) -> None:
    """Prefill-only and decode-only steering, and a single position: each row is edited once, and
    not again in later chunks or steps.
    """  # field case 9
    prompt = prompt_of(100)  # two steps of prefill
    tiers = {
        "all_prompt": range(100),
        "all_generated": range(100, 104),
        "last_prompt": [99],
        "some": [3, 70],
    }
    jobs = {}
    for positions, where in tiers.items():
        (entry,) = v1.steering(FAMILIES["clamp"])
        entry = msgspec.structs.replace(
            entry, positions=where if positions == "some" else positions
        )
        jobs[positions] = v1.job(
            prompt, max_tokens=5, capture=capture_of(ALL, "all"), steering=[entry]
        )
    answers = v1.run(*jobs.values())
    for positions, job in jobs.items():
        tokens = prompt + answers[job.id][0].token_ids
        edit = FAMILIES["clamp"]._replace(positions=list(tiers[positions]))
        wanted = reference.post_block(tokens[:-1], [edit])
        for layer in ALL:
            assert relative_error(v1.capture(job).array(layer), wanted[layer]) <= FP32_ROWS
        assert v1.receipts(job)[0].applied == len(tiers[positions])


def test_steered_outputs_are_judged_by_their_logprobs_within_one_batch(
    v1: Host, reference: Reference
) -> None:
    # field case 12
    """Greedy tokens flip where two are almost equally good; what the model thinks of them does
    not.
    """
    wanted = {"plain": [], "add": [FAMILIES["add"]], "ablate": [FAMILIES["ablate"]]}
    found = trials(v1, wanted, same_prompt=True)
    seen = {}
    for name, trial in found.items():
        reference.rows(trial.tokens[:-1], wanted[name])
        logits = reference.logits[PROMPT - 1 :].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        generated = trial.tokens[PROMPT:]
        np.testing.assert_allclose(
            trial.logprobs,
            logprobs[np.arange(len(generated)), generated],
            atol=FP32_LOGPROBS,
            rtol=0,
        )
        seen[name] = logprobs[0]
    for name in ("add", "ablate"):
        assert np.abs(seen[name] - seen["plain"]).max() > 100 * FP32_LOGPROBS


NOTHING = {
    "a scale of 0": [FAMILIES["add"]._replace(scale=0.0)],
    "a matched scale of 0": [FAMILIES["add_matched"]._replace(scale=0.0)],
    "an alpha of 0": [FAMILIES["replace"]._replace(alpha=0.0)],
    "ablating with a strength of 0": [FAMILIES["ablate"]._replace(strength=0.0)],
    "a lowrank with a strength of 0": [FAMILIES["lowrank"]._replace(strength=0.0)],
    "a clamp whose range holds every component": [
        Edit(layer, V, op="clamp", low=-1e4, high=1e4, hook=hook) for layer in ALL for hook in HOOKS
    ],
    "an addition and its negative": [FAMILIES["add"], FAMILIES["add"]._replace(scale=1.5)],
}


def test_interventions_that_do_nothing_change_no_bit(v1: Host) -> None:
    """Each alone, in steps that are composed alike."""
    plain = trials(v1, {"plain": []})["plain"]
    for name, edits in NOTHING.items():
        found = trials(v1, {name: edits})[name]
        assert found.applied > 0, name
        assert found.tokens == plain.tokens, name
        for place in plain.before:
            assert np.array_equal(found.before[place], plain.before[place]), (name, place)
            assert np.array_equal(found.after[place], plain.after[place]), (name, place)
