"""What are the ranks told about one prompt of a job?"""

from .. import __version__
from ..schemas.jobs import Job
from ..schemas.selectors import depends_on_prompt, lowest_position
from ..schemas.specs import RankSpec, StoredSteering, content_key, steering_digest
from ..schemas.steering import GlobalSteering


def rank_spec(job: Job, request: int, attempt: int, everyone: GlobalSteering) -> RankSpec | None:
    """None when nothing is asked for, by nobody: then no rank reports."""
    own = job.steering[request] if job.steering else []
    captures = job.captures[request] if job.captures else []
    if not own and not captures and not everyone.entries:
        return None
    prompt_tokens = len(job.prompts[request].token_ids)
    standing = everyone.at(prompt_tokens)
    steering = [*standing, *own]
    lowest = min((lowest_position(capture.positions, prompt_tokens) for capture in captures), default=prompt_tokens)
    return RankSpec(
        version=__version__,
        job=job.id,
        request=request,
        attempt=attempt,
        prompt_tokens=prompt_tokens,
        steering=own,
        captures=captures,
        digest=_digest(standing, own),
        by_prompt=any(depends_on_prompt(entry.positions) for entry in steering),
        first_affected=min((lowest_position(entry.positions, prompt_tokens) for entry in steering), default=-1),
        lowest_captured=lowest if lowest < prompt_tokens else -1,
        requests=job.captured,
        told_when_over=bool(job.sampling.stop),
        global_steering=standing,
        global_version=everyone.version,
    )


def _digest(everyone: list[StoredSteering], own: list[StoredSteering]) -> str:
    """Of all that touches the request's KV cache. The same entries share it, whether they are everyone's or the request's own.

    With both they are told apart: each takes rows of its own, and what shares a row is rounded once.
    """
    if everyone and own:
        return content_key([steering_digest(everyone), steering_digest(own)])
    return steering_digest(everyone or own)
