"""The spec that ranks receive for one prompt of a job."""

from ....schemas.base.version import __version__
from ....schemas.prompts.selectors import depends_on_prompt, lowest_position
from ....schemas.requests.specs import (
    RankSpec,
    StoredSteering,
    content_key,
    depth_of,
    occurrences,
    steering_digest,
    steering_rows,
    with_columns,
    within,
)
from ..protocol import EngineRequest


def rank_spec(ask: EngineRequest, *, exits: bool = False) -> RankSpec | None:
    """Returns the spec of a request; None if neither user nor operator requests anything of the
    ranks, which then report nothing.

    `exits`: a forward pass may end before the last layer.
    """
    own_steering = ask.steering
    captures = ask.captures
    global_steering = ask.global_steering
    if (
        not own_steering
        and not captures
        and not global_steering.entries
        and ask.grade is None
        and ask.lora is None
    ):
        return None
    prompt_tokens = len(ask.token_ids)
    global_rows = global_steering.at(prompt_tokens)
    depth = needed_depth(ask) if exits else 0
    if depth:
        global_rows = within(global_rows, depth)
        own_steering = within(own_steering, depth)
    # Global entries travel as if the user had written them first. Digest, first affected position
    # and prefix cache need no second rule, and ranks no state that would have to follow the ledger.
    steering = [*global_rows, *own_steering]
    lowest = min(
        (lowest_position(capture.positions, prompt_tokens) for capture in captures),
        default=prompt_tokens,
    )
    return RankSpec(
        version=__version__,
        job=ask.job,
        request=ask.request,
        attempt=ask.attempt,
        prompt_tokens=prompt_tokens,
        rows=with_columns(steering_rows(steering)),
        occurrences=occurrences(steering, ask.token_ids),
        captures=captures,
        digest=_digest(global_rows, own_steering, ask),
        by_prompt=any(depends_on_prompt(entry.positions) for entry in steering),
        first_affected=min(
            (lowest_position(entry.positions, prompt_tokens) for entry in steering), default=-1
        ),
        lowest_captured=lowest if lowest < prompt_tokens else -1,
        requests=ask.captured,
        worker_reports_end=bool(ask.sampling.stop),
        global_version=global_steering.version,
        entry=ask.entry,
        grade=ask.grade,
        base=ask.base,
        keep_blocks=ask.keep_blocks,
        trace=ask.trace,
        lora=ask.lora,
        chunk=ask.chunk,
        images=ask.spans,
        probes=ask.probes,
        stream_scores=ask.stream and any(probe.policy is None for probe in ask.probes),
        tenant=ask.tenant,
        depth=depth,
    )


def needed_depth(ask: EngineRequest) -> int:
    """Returns `RankSpec.depth` of a request."""
    if ask.sampling.reads_logits or ask.grade is not None:
        return 0
    return depth_of(ask.captures, len(ask.token_ids))


def _digest(
    global_steering: list[StoredSteering], own_steering: list[StoredSteering], ask: EngineRequest
) -> str:
    """Returns the digest of everything that affects the request's KV cache.

    The same entries have the same digest, whether they are global or the request's own. A request
    with both kinds has another digest: each kind has its own rows, and entries that share a row are
    rounded together. Three kinds of requests share no blocks: if a forward pass begins above the
    first layer, the KV cache below that layer is unwritten; if edits are gated, a score next to the
    threshold may round to its other side in another batch; if an edit may fail the request, every
    row must be computed and checked.
    """
    digest = (
        content_key([steering_digest(global_steering), steering_digest(own_steering)])
        if global_steering and own_steering
        else steering_digest(global_steering or own_steering)
    )
    unshared = ask.entry is not None or any(
        entry.gate or entry.limit < 0 for entry in (*global_steering, *own_steering)
    )
    return content_key([digest, ask.job, ask.request, ask.attempt]) if unshared else digest
