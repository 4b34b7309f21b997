"""The OpenAI-style routes.

A completion is a job like any other; these handlers wait for it and answer in OpenAI's shape.

A response with `capture_wait: true`, steering, probes, or rows or readings to return is sent once
the job is over: then every capture is durable, and every rank has reported and agrees. (So is a
response that only global steering edits, or that only probes of all traffic score: until then, a
rank might report that it applied nothing, or could not score.) Other responses are sent as soon as
the outputs are stored; their captures are `pending`, with the place to look.
"""

from typing import Annotated, Any

from litestar import Response, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody, QueryParameter
from litestar.response import Stream

from ...schemas.access.keys import Caller
from ...schemas.base.errors import MidstreamError
from ...schemas.base.limits import MAX_MODULE_TEXT, MAX_URL_MODULES
from ...schemas.base.records import now
from ...schemas.jobs.jobs import JobView
from ...schemas.jobs.openai import ChatCompletion, ChatRequest, Completion, CompletionRequest
from ...schemas.readings.readings import READINGS
from ..context import AppContext, unless_client_leaves
from ..resolve.prompts.request_parsing import ParsedRequest, parse_chat, parse_completion
from ..resolve.prompts.url_modules import as_written, modules_of, with_modules
from ..responses import events, openai_shapes
from ..responses.openai_shapes import AnswerShape
from ..responses.outcome import (
    ACCEPTED,
    LIVE,
    UNDER_WAY,
    accepted,
    failed,
    failure_of,
    is_over,
    result_of,
)
from ..responses.streaming import StreamedRequest
from ..web.auth import needs
from ..web.body import JsonRequest
from ..web.middleware import released
from ..web.problems import JOB_HEADER, VERDICT_HEADER
from ..web.request_context import keep_steering
from .jobs import SUBMIT_ERRORS, IdempotencyKey

RESPONSES = {
    202: ResponseSpec(
        JobView,
        description="The response was held for the maximum time; the job continues",
        generate_examples=False,
    ),
    **SUBMIT_ERRORS,
}
ADDED = ", ".join(f"`{field}`" for field in READINGS)
DESCRIPTION = (
    "OpenAI's API with `steering`, `patch`, `capture`, "
    f"{ADDED} and `capture_wait`. With `stream: true` the answer "
    "is server-sent chunks; the last one before `[DONE]` carries `capture_results` "
    "and `determinism`. `verdicts`, and without a stream the header `X-Midstream-Policies`, say "
    "what the policies decided that are `told`. `?module=NAME:SCALE` adds named "
    "modules to `steering`."
)
ModuleParameter = Annotated[
    list[Annotated[str, QueryParameter(max_length=MAX_MODULE_TEXT)]] | None,
    QueryParameter(
        name="module",
        max_items=MAX_URL_MODULES,
        description="A named steering module: `NAME`, or `NAME:SCALE`; repeatable",
    ),
]


async def _answer(
    request: JsonRequest,
    context: AppContext,
    caller: Caller,
    body: CompletionRequest | ChatRequest,
    parsed: ParsedRequest,
    shape: AnswerShape,
    key: str | None,
    modules: list[str] | None,
) -> Response[Any]:
    entries = modules_of(modules or [])
    keep_steering(entries)
    parsed = with_modules(parsed, entries)
    created = now()
    needed = openai_shapes.wanted_of(body)
    choices = len(parsed.prompts) * parsed.n
    with as_written(parsed):
        job_id = await context.submit(parsed, request.idempotency(key), caller)
    headers = {JOB_HEADER: job_id, "Location": context.job_url(job_id)}
    read = [*parsed.readings, *(["probes"] if parsed.probes or parsed.policies else [])]
    hold = (
        body.capture_wait
        or bool(read)
        or (parsed.capture is not None and "memory" in parsed.capture.consumers)
    )

    def until(view: JobView) -> bool:
        return is_over(view) or (
            not hold and not view.steered and not view.probed and view.generated is not None
        )

    def with_extras(view: JobView) -> bool:
        return parsed.capture is not None or view.steered

    if parsed.stream:
        streamed = StreamedRequest(
            context=context,
            shape=shape,
            job_id=job_id,
            model=parsed.model,
            created=created,
            choices=choices,
            wanted=needed,
            caller=caller,
            until=until,
            with_usage=bool(body.stream_options and body.stream_options.include_usage),
            with_extras=with_extras,
            readings=read,
            policies=parsed.policies,
        )
        return Stream(
            streamed.body(),
            media_type=events.MEDIA_TYPE,
            headers={**events.HEADERS, **headers},
            status_code=200,
        )
    try:
        known = ACCEPTED
        quiet = LIVE if hold or parsed.steering else UNDER_WAY
        while True:
            held = context.waiting.outcome(
                job_id, until, context.settings.max_wait_s, quiet=quiet, known=known
            )
            outcome = await unless_client_leaves(request, held)
            known = 0
            view = outcome.view
            if not until(view):
                return accepted(context, view, headers)
            problem = failure_of(view)
            if problem is not None:
                return failed(request, problem, headers)
            result = outcome.result or await result_of(context, job_id)
            if is_over(view) or len(result.outputs) == choices:
                break  # else its worker died meanwhile, and its outputs were dropped
        more = openai_shapes.extras(result, with_extras(view), is_over(view), read, parsed.policies)
        if verdicts := more.get("verdicts"):
            headers[VERDICT_HEADER] = openai_shapes.in_header(verdicts)
    except MidstreamError as error:  # the job is accepted nevertheless: return its address
        return failed(request, error.problem(instance=context.job_url(job_id)), headers)
    released(outcome)
    return Response(
        openai_shapes.whole(shape, result, created, needed, more), status_code=200, headers=headers
    )


@post(
    "/v1/completions",
    opt=needs("submit"),
    status_code=200,
    summary="Create a completion",
    description=DESCRIPTION,
    responses=RESPONSES,
)
async def complete(
    data: JSONBody[CompletionRequest],
    request: JsonRequest,
    context: AppContext,
    caller: Caller,
    key: IdempotencyKey = None,
    module: ModuleParameter = None,
) -> Response[Completion]:
    return await _answer(
        request,
        context,
        caller,
        body=data,
        parsed=await request.computed(parse_completion, data),
        shape=openai_shapes.COMPLETION,
        key=key,
        modules=module,
    )


@post(
    "/v1/chat/completions",
    opt=needs("submit"),
    status_code=200,
    summary="Create a chat completion",
    description=DESCRIPTION,
    responses=RESPONSES,
)
async def chat(
    data: JSONBody[ChatRequest],
    request: JsonRequest,
    context: AppContext,
    caller: Caller,
    key: IdempotencyKey = None,
    module: ModuleParameter = None,
) -> Response[ChatCompletion]:
    parsed = await request.computed(parse_chat, data)
    return await _answer(
        request,
        context,
        caller,
        body=data,
        parsed=parsed,
        shape=openai_shapes.CHAT,
        key=key,
        modules=module,
    )


ROUTES = [complete, chat]
