"""The OpenAI-style routes. A completion is a job like any other; these handlers wait for it and answer in OpenAI's shape.

When is a response answered? With `capture_wait: true`, with steering, with probes, or with rows or readings that are to come back in
it, once the job is over: then every capture is durable, every rank has reported and all agree. (A steered answer, also of a request
that only global steering edits, is never given before: a rank might still report that it applied nothing. Nor is one that probes score,
also those that watch all traffic: a rank might report that it could not.) Without any of these, as soon as the outputs are stored;
captures are `pending` then, with the place to look.
"""

from typing import Any

from litestar import Response, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody
from litestar.response import Stream

from ...schemas.base import now
from ...schemas.errors import MidstreamError
from ...schemas.jobs import JobView
from ...schemas.openai import ChatCompletion, ChatRequest, Completion, CompletionRequest
from ..context import context_of, unless_client_leaves
from ..resolve.readings import asked as asked_readings
from ..resolve.request_parsing import ParsedRequest, parse_chat, parse_completion
from ..responses import events, openai_shapes
from ..responses.openai_shapes import Shape
from ..responses.outcome import ACCEPTED, LIVE, UNDER_WAY, accepted, failed, failure_of, is_over, job_url, result_of
from ..responses.streaming import Streamed
from ..web import problems
from ..web.auth import caller_of
from ..web.body import JsonRequest
from ..web.middleware import released
from ..web.problems import JOB_HEADER
from .jobs import SUBMIT_ERRORS, Key

RESPONSES = {
    202: ResponseSpec(JobView, description="The response was held for the maximum time; the job continues", generate_examples=False),
    **SUBMIT_ERRORS,
}
DESCRIPTION = (
    "OpenAI's API with `steering`, `patch`, `capture`, `lens`, `features`, `readers` and `capture_wait`. With `stream: true` the answer "
    "is server-sent chunks; the last one before `[DONE]` carries `capture_results` and `determinism`."
)


async def _answer(
    request: JsonRequest, body: CompletionRequest | ChatRequest, parsed: ParsedRequest, shape: Shape, key: str | None
) -> Response[Any]:
    context = context_of(request)
    created, wanted = now(), openai_shapes.wanted_of(body)
    choices = len(parsed.prompts) * parsed.n
    job_id = await context.submit(parsed, request.idempotency(key), caller_of(request))
    headers = {JOB_HEADER: job_id, "Location": job_url(context, job_id)}
    read = [*asked_readings(parsed), *(["probes"] if parsed.probes else [])]
    hold = body.capture_wait or bool(read) or (parsed.capture is not None and "memory" in parsed.capture.consumers)

    def until(view: JobView) -> bool:
        return is_over(view) or (not hold and not view.steered and not view.probed and view.generated is not None)

    def asked(view: JobView) -> bool:
        return parsed.capture is not None or view.steered

    if parsed.stream:
        streamed = Streamed(
            context=context,
            shape=shape,
            job_id=job_id,
            model=parsed.model,
            created=created,
            choices=choices,
            wanted=wanted,
            caller=caller_of(request),
            until=until,
            with_usage=bool(body.stream_options and body.stream_options.include_usage),
            with_extras=asked,
            readings=read,
        )
        return Stream(streamed.body(), media_type=events.MEDIA_TYPE, headers={**events.HEADERS, **headers}, status_code=200)
    try:
        known, quiet = ACCEPTED, LIVE if hold or parsed.steering else UNDER_WAY
        while True:
            held = context.outcome(job_id, until, context.settings.max_wait_s, quiet=quiet, known=known)
            outcome, known = await unless_client_leaves(request, held), 0
            view = outcome.view
            if not until(view):
                return accepted(context, view, headers)
            problem = failure_of(view) if is_over(view) else None
            if problem is not None:
                return failed(request, problem, headers)
            result = outcome.result or await result_of(context, job_id)
            if is_over(view) or len(result.outputs) == choices:
                break  # else its worker died in between and the outputs went with the attempt
    except MidstreamError as error:  # the job is accepted all the same: say where it is
        return problems.answer(request, error.problem(instance=job_url(context, job_id)), {**headers, "x-should-retry": "false"})
    released(request, outcome)
    more = openai_shapes.extras(result, asked(view), is_over(view), read)
    return Response(openai_shapes.whole(shape, result, created, wanted, more), status_code=200, headers=headers)


@post("/v1/completions", status_code=200, summary="Create a completion", description=DESCRIPTION, responses=RESPONSES)
async def complete(data: JSONBody[CompletionRequest], request: JsonRequest, key: Key = None) -> Response[Completion]:
    return await _answer(request, data, parse_completion(data), openai_shapes.COMPLETION, key)


@post("/v1/chat/completions", status_code=200, summary="Create a chat completion", description=DESCRIPTION, responses=RESPONSES)
async def chat(data: JSONBody[ChatRequest], request: JsonRequest, key: Key = None) -> Response[ChatCompletion]:
    return await _answer(request, data, parse_chat(data), openai_shapes.CHAT, key)


ROUTES = [complete, chat]
