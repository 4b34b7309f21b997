"""Validation of a parsed request against the model: a `ParsedRequest` becomes a `Job`, or a 400
names the field and what is valid.

Everything is checked here, against what the worker has published of its model, so that a bad
request never reaches the engine.
"""

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ....broker.ledger.named.registry import Lookup
from ....schemas.access.handling import Handling, callback_of
from ....schemas.access.keys import EVERYBODY, Caller, scoped
from ....schemas.artifacts.probes import StoredProbe
from ....schemas.base.edit_sizes import EditLimit
from ....schemas.base.errors import (
    Excluded,
    MidstreamError,
    Translated,
    check_excluded,
    invalid,
    shortened,
)
from ....schemas.base.limits import (
    MAX_CHOICE_TOKENS,
    MAX_FOUND_POSITIONS,
    MAX_INT64,
    MAX_PROMPTS,
)
from ....schemas.base.records import now
from ....schemas.base.tensors import PackedBlobs, PackedTensors
from ....schemas.jobs.jobs import Job, Sampling, StoredPrompt
from ....schemas.jobs.kinds import KINDS
from ....schemas.jobs.models import NO_TOOL_PARSER, ModelInfo
from ....schemas.prompts.images import digest_of
from ....schemas.prompts.selectors import (
    Span,
    SpanFinder,
)
from ....schemas.prompts.sight import sight_of
from ....schemas.prompts.sites import asked_names
from ....schemas.requests.specs import PromptEdits, StoredCapture, probe_captures
from ...web.aside import call_aside
from ..edits.model_state import NOTHING, ModelState
from ..edits.patches import runs_of
from ..edits.steering import limited, resolve_edits
from ..positions.captures import (
    Bounds,
    PromptFacts,
    Stored,
    resolve_captures,
    stored_captures,
)
from ..positions.gates import gated_by
from ..positions.windows import with_trigger_tokens, with_window_tokens
from ..prompts.images import check_number as check_number_of_images, placed
from ..prompts.request_parsing import (
    ParsedPrompt,
    ParsedRequest,
    last_said,
    plain_messages,
)
from ..prompts.tokenizer import (
    INLINE_CHARACTERS,
    ChatInput,
    Codec,
    FoundSpan,
    SearchedPrompt,
    TooLong,
    check_vocabulary,
    too_many_positions,
)
from ..readings.probes import check_tokens
from ..readings.readings import (
    readings_of,
    resolve_readings,
    with_token_ids_of,
)
from .costs import ENTRY_COST, RESOLVE_INLINE, check_cost, numbers_in, spans_of
from .names import NO_NAMES, Referents, artifacts_of, modules_of
from .tokenless import check_tokenless, layers_of

#: The most tokens that are decoded for the title of a job whose prompt has no text.
TITLE_TOKENS = 64
EMPTY_ONCE_TOKENISED = "has no tokens: a prompt needs at least one"


@dataclass(frozen=True)
class Admitted:
    """A job that can be submitted, with the contents that it names by hash."""

    job: Job
    blobs: PackedBlobs
    pinned: list[str]  # hashes of tensors of named modules and probes, which are already stored


# --- Prompts and sampling -------------------------------------------------------------------------


async def tokenise(
    prompts: Sequence[ParsedPrompt], model: ModelInfo, codec: Codec
) -> list[StoredPrompt]:
    """Return every prompt as token ids of this model. All texts get special tokens, or none.

    Raises a 400 naming the prompt that is empty or outside the vocabulary.
    """
    for prompt in prompts:
        if not prompt.value:
            raise invalid(prompt.field, "is empty: a prompt needs at least one token")
    plain = [prompt for prompt in prompts if isinstance(prompt.value, str)]
    with _naming(plain, model):
        encoded = iter(
            await codec.encode(
                [str(prompt.value) for prompt in plain], special_tokens=plain[0].special_tokens
            )
            if plain
            else []
        )
    said = [prompt for prompt in prompts if prompt.is_conversation]
    chats = []
    for prompt in said:
        check_number_of_images(prompt.images, prompt.field, model)
        chats.append(chat_of(prompt))
    with _naming(said, model):
        rendered = iter(await codec.encode_chats(chats))
    stored = []
    for prompt in prompts:
        if isinstance(prompt.value, str):
            ids = next(encoded)
            if not ids:
                raise invalid(prompt.field, EMPTY_ONCE_TOKENISED)
            # without special tokens, spans are found in what the ids decode to
            text = prompt.value if prompt.special_tokens else None
            stored.append(StoredPrompt(token_ids=ids, text=text))
        elif prompt.is_conversation:
            ids, text = next(rendered)
            stored.append(
                StoredPrompt(
                    token_ids=ids, text=text, images=placed(ids, prompt.images, prompt.field, model)
                )
            )
        else:
            await asyncio.sleep(0)
            ids = [token for token in prompt.value if isinstance(token, int)]
            check_vocabulary(ids, prompt.field, model)
            stored.append(StoredPrompt(token_ids=array("i", ids)))
    return stored


def _naming(prompts: Sequence[ParsedPrompt], model: ModelInfo) -> Translated[TooLong]:
    """Turn the error for one of these prompts into the 400 that names its field."""
    return Translated(
        TooLong, lambda error: too_long(error, prompts[error.index].field, model), hidden=True
    )


def too_long(error: TooLong, field: str, model: ModelInfo) -> MidstreamError:
    """Return the 400 for a prompt at `field` that leaves no room to generate."""
    if error.tokens is None:
        return invalid(field, error.detail)
    return invalid(
        field,
        (
            f"has {error.tokens} tokens, which leaves no room to generate: the model's "
            f"limit is {model.max_model_len} in total"
        ),
    )


def check_lengths(parsed: ParsedRequest, prompts: Sequence[StoredPrompt], model: ModelInfo) -> int:
    """Return how many tokens to generate.

    Raises a 400 if a prompt, with or without its generated tokens, exceeds the model's length.
    """
    longest = 0
    for prompt, from_body in zip(prompts, parsed.prompts, strict=True):
        tokens = len(prompt.token_ids)
        if tokens >= model.max_model_len:
            raise too_long(TooLong(0, tokens), from_body.field, model)
        longest = max(longest, tokens)
    room = model.max_model_len - longest
    if parsed.fill_max_tokens:
        return room
    if parsed.sampling.max_tokens > room:
        raise invalid(
            f"{parsed.sampling_at}max_tokens",
            (
                f"{parsed.sampling.max_tokens} after a prompt of length {longest} exceeds the "
                f"model's limit of {model.max_model_len}"
            ),
            allowed=f"1 to {room}",
        )
    return parsed.sampling.max_tokens


def check_sampling(
    sampling: Sampling, at: str, model: ModelInfo, max_tokens: int | None = None
) -> None:
    """Check what the types of sampling parameters cannot express.

    `max_tokens`: the number that the request gives; None if it gives none.
    """
    vocabulary = model.vocab_size
    check_excluded(
        [
            Excluded(
                f"{at}top_k",
                sampling.top_k > vocabulary,
                "is too large",
                allowed=f"0 to {vocabulary}",
            ),
            *(
                Excluded(
                    f"{at}logit_bias",
                    token >= vocabulary,
                    f"token id {token} is outside the vocabulary",
                    allowed=f"0 to {vocabulary - 1}",
                )
                for token in sampling.logit_bias or {}
            ),
            Excluded(
                f"{at}min_tokens",
                max_tokens is not None and sampling.min_tokens > max_tokens,
                f"{sampling.min_tokens} exceeds max_tokens",
                allowed=f"0 to {max_tokens}",
            ),
        ]
    )
    check_vocabulary(sampling.stop_token_ids, f"{at}stop_token_ids", model)
    check_vocabulary(sampling.allowed_token_ids or [], f"{at}allowed_token_ids", model)


def check_choices(parsed: ParsedRequest) -> None:
    """Raises a 400 if all `n` choices would be the same, or are more than a job may have."""
    n = parsed.n
    sampling = parsed.sampling
    prompts = len(parsed.prompts)
    if n == 1:
        return
    check_excluded(
        [
            Excluded(
                "n",
                sampling.temperature == 0,
                f"is {n} with temperature 0, where all choices would be the same",
                allowed="1, or a temperature above 0",
            ),
            Excluded(
                "n",
                prompts * n > MAX_PROMPTS,
                f"is {n} for {prompts} prompts",
                allowed=f"at most {MAX_PROMPTS} choices in one request",
            ),
            Excluded(
                "seed",
                sampling.seed is not None and sampling.seed > MAX_INT64 - n,
                "is too large: each choice adds 1 to it",
                allowed=f"at most {MAX_INT64 - n} with n: {n}",
            ),
        ]
    )


def with_choices(
    parsed: ParsedRequest, prompts: list[StoredPrompt]
) -> tuple[ParsedRequest, list[StoredPrompt]]:
    """Return the request and the prompts, with each prompt `n` times.

    Raises a 400 if that is too much to store.
    """
    if parsed.n == 1:
        return parsed, prompts
    tokens = parsed.n * sum(len(prompt.token_ids) for prompt in prompts)
    if tokens > MAX_CHOICE_TOKENS:
        raise invalid(
            "n",
            f"{parsed.n} choices have prompts of {tokens} tokens in all",
            allowed=f"at most {MAX_CHOICE_TOKENS}",
        )
    repeated = [prompt for prompt in parsed.prompts for _ in range(parsed.n)]
    return replace(parsed, prompts=repeated), [
        prompt for prompt in prompts for _ in range(parsed.n)
    ]


def with_tools(parsed: ParsedRequest, model: ModelInfo) -> ParsedRequest:
    """Returns the request, without its tools if it may not call them (the template still shows
    them). Raises a 400 when the worker has no parser for the model's tool calls.
    """
    if parsed.tools is None or model.tool_parser:
        return parsed
    if parsed.tools.choice == "none" and not parsed.tools.named:
        return replace(parsed, tools=None)
    raise invalid(
        "tools",
        f"{model.name!r} is served without a parser of tool calls",
        hint=NO_TOOL_PARSER
        + (
            f"; its chat template suggests {' or '.join(model.tool_parsers)}"
            if model.tool_parsers
            else ""
        ),
    )


# --- Captures and steering ------------------------------------------------------------------------

Resolved = tuple[list[list[StoredCapture]], PromptEdits, PackedTensors]


async def resolve(
    parsed: ParsedRequest,
    prompts: Sequence[StoredPrompt],
    model: ModelInfo,
    codec: Codec,
    max_tokens: int,
    named: Referents = NO_NAMES,
    stored: Stored = stored_captures,
) -> Resolved:
    """Return captures and edits for each prompt, and the request's tensors by content hash.
    `stored` resolves the request's own capture.

    Raises a 400 naming the field.
    """
    model_state = named.state
    probes = named.probes
    policies = named.policies
    parsed = await with_token_ids_of(parsed, codec)
    capture = await with_window_tokens(parsed.capture, codec)
    steering = await with_trigger_tokens(parsed.steering, codec)
    parsed = replace(parsed, capture=capture, steering=steering)

    facts, apart = await facts_of(parsed, prompts, model, codec, model_state)

    def resolved() -> Resolved:
        bounds = Bounds(model, facts, max_tokens, [probe.name for probe in probes], named.found)
        of_policies = replace(bounds, probes=[probe.name for probe in policies.probes])
        more = [(at, stored_captures(spec, of_policies, at)) for at, spec in policies.captures]
        idle = [(at, stored_captures(spec, of_policies, at)[0]) for at, spec in policies.idle]
        scored = [("probes", capture) for capture in probe_captures(probes)]
        readings = resolve_readings(parsed, bounds)
        captures = resolve_captures(
            parsed.capture, bounds, [*readings, *more], stored, [*idle, *scored]
        )
        gated = [*gated_by(parsed.probes), *policies.gated]
        return captures, *resolve_edits(
            parsed.patch, parsed.steering, bounds, model_state, gated, parsed.scales
        )

    return await call_aside(resolved) if apart else resolved()


async def facts_of(
    parsed: ParsedRequest,
    prompts: Sequence[StoredPrompt],
    model: ModelInfo,
    codec: Codec,
    model_state: ModelState = NOTHING,
) -> tuple[list[PromptFacts], bool]:
    """Return facts about each prompt, by which selectors are resolved, and whether that takes so
    long that it should leave the event loop.

    Raises a 400 naming the field that costs too much.
    """
    # an estimate where only a prompt's tokens are known
    characters = sum(
        4 * len(each.token_ids) if each.text is None else len(each.text) for each in prompts
    )
    cost = check_cost(parsed, len(prompts), characters, model_state)
    cost += sum(
        len(prompts) * (ENTRY_COST + numbers_in(spec.positions)) for spec in model.global_captures
    )
    spans = spans_of(parsed, model_state)
    apart = cost > RESOLVE_INLINE or (bool(spans) and characters > INLINE_CHARACTERS)
    if not spans:
        return [PromptFacts(len(each.token_ids), images=each.images) for each in prompts], apart
    searched = [*map(_searched, prompts, parsed.prompts)]
    (first, *_), *_ = spans.values()
    with Translated(
        MidstreamError,
        lambda error: error.at(first if error.kind == "invalid_request" else error.field),
        hidden=True,
    ):
        found = await codec.locate(searched, [*spans], apart)
    listed = 0
    for fields, places in zip(spans.values(), zip(*found, strict=True), strict=True):
        listed += len(fields) * sum(map(len, places))
        if listed > MAX_FOUND_POSITIONS:
            raise too_many_positions(fields[-1])
    facts = [
        PromptFacts(
            len(prompt.token_ids), _finder(dict(zip(spans, of_prompt, strict=True))), prompt.images
        )
        for prompt, of_prompt in zip(prompts, found, strict=True)
    ]
    return facts, apart


def _searched(prompt: StoredPrompt, from_body: ParsedPrompt) -> SearchedPrompt:
    return SearchedPrompt(
        ids=array("i", prompt.token_ids).tobytes(),
        text=prompt.text,
        chat=chat_of(from_body) if from_body.is_conversation else None,
        images=[place for image in prompt.images for place in range(image.start, image.stop)],
    )


async def with_turns(
    parsed: ParsedRequest,
    prompts: list[StoredPrompt],
    probes: Sequence[StoredProbe],
    codec: Codec,
) -> list[StoredPrompt]:
    """Return the prompts, those of conversations with their turns, if a policy reads by them."""
    schedules = (probe.policy.condition.schedule for probe in probes if probe.policy is not None)
    if not any(sight_of(schedule.tokens, None) for schedule in schedules):
        return prompts
    chats = [number for number, each in enumerate(parsed.prompts) if each.is_conversation]
    searched = [_searched(prompts[number], parsed.prompts[number]) for number in chats]
    turns = dict(zip(chats, await codec.turn_maps(searched), strict=True))
    return [
        msgspec.structs.replace(prompt, turns=turns.get(number))
        for number, prompt in enumerate(prompts)
    ]


def _finder(found: Mapping[Span, FoundSpan]) -> SpanFinder:
    return lambda span: found[span].positions()


def chat_of(prompt: ParsedPrompt) -> ChatInput:
    """Return a conversation as it is rendered."""
    roles: list[str] = [message.role for message in prompt.messages]
    return ChatInput(plain_messages(prompt.messages), prompt.rendering, roles)


# --- Admission ------------------------------------------------------------------------------------


async def admit(
    parsed: ParsedRequest,
    model: ModelInfo,
    codec: Codec,
    job_id: str,
    named: Referents = NO_NAMES,
    caller: Caller = EVERYBODY,
    stored: Stored = stored_captures,
) -> Admitted:
    """Return the parsed request as a job of `caller` with this id. `stored` resolves its own
    capture.

    Raises a 400 with the path of the field at fault.
    """
    probes = [*named.probes, *named.policies.probes]
    model_state = named.state
    check_tokenless(parsed)
    check_sampling(
        parsed.sampling,
        parsed.sampling_at,
        model,
        None if parsed.fill_max_tokens else parsed.sampling.max_tokens,
    )
    check_choices(parsed)
    parsed = with_tools(parsed, model)
    prompts = await tokenise(parsed.prompts, model, codec)
    prompts = await with_turns(parsed, prompts, probes, codec)
    parsed, prompts = with_choices(parsed, prompts)
    max_tokens = check_lengths(parsed, prompts, model)
    check_tokens(probes, [len(prompt.token_ids) + max_tokens for prompt in prompts])
    captures, steering, blobs = await resolve(
        parsed, prompts, model, codec=codec, max_tokens=max_tokens, named=named, stored=stored
    )
    job = Job(
        id=job_id,
        kind=parsed.kind,
        title=_title(parsed.prompts[0], prompts[0], codec),
        model=model.name,
        prompts=prompts,
        sampling=msgspec.structs.replace(parsed.sampling, max_tokens=max_tokens),
        created=now(),
        steering=steering,
        captures=captures,
        stream=parsed.stream,
        metadata=parsed.metadata,
        modules={name: model_state.modules[name].digest for name in modules_of(parsed)},
        runs={name: model_state.runs[name].job for name in runs_of(parsed.patch)},
        n=parsed.n,
        tools=parsed.tools,
        echo=parsed.echo,
        fills=parsed.fill_max_tokens and any(prompt.images for prompt in prompts),
        run=scoped(caller.tenant, parsed.capture.run)
        if parsed.capture and parsed.capture.run
        else "",
        lora=named.lora,
        probes=probes,
        conversation=parsed.conversation or "",
        hooks=named.policies.hooks,
        identity=model.identity,
        layers=layers_of(parsed.sampling, prompts, captures, probes, model),
        queue=KINDS[parsed.kind].queue,
        contents=_contents(parsed, model, named.found, probes),
        hook_names=asked_names(
            parsed.capture,
            *(spec for _, _, spec in readings_of(parsed)),
            *parsed.steering,
            *parsed.patch,
        ),
        **handled(parsed.handling, caller),
    )
    pinned = {name for module in model_state.modules.values() for name in module.tensors}
    pinned |= {
        name for gated in named.policies.gated if gated.module for name in gated.module.tensors
    }
    pinned |= {name for probe in probes for name in probe.content.tensors}
    pinned |= {name for of_prompt in captures for capture in of_prompt for name in capture.tensors}
    blobs |= {digest_of(data): data for prompt in parsed.prompts for data in prompt.images}
    return Admitted(job, blobs, sorted(pinned - blobs.keys()))


def _title(prompt: ParsedPrompt, stored: StoredPrompt, codec: Codec) -> str:
    """Return the value of `Job.title`: what the user said last in a conversation, and the beginning
    of a prompt that has no text.
    """
    if prompt.is_conversation:
        return shortened(last_said(prompt.messages))
    return codec.text_of(stored.token_ids[:TITLE_TOKENS]) if stored.text is None else ""


def _contents(
    parsed: ParsedRequest, model: ModelInfo, found: Lookup, probes: Sequence[StoredProbe]
) -> dict[str, str]:
    """Return the value of `Job.contents`."""
    contents = {
        f"{kind.short}/{name}": found.known(kind, name, kind.short).digest
        for kind, name in artifacts_of(parsed, model.extensions)
    }
    for probe in probes:
        kind, used = ("probe", probe) if probe.policy is None else ("policy", probe.policy)
        contents[f"{kind}/{used.name}"] = used.digest
    return contents | {
        f"{extension.kind}/{extension.name}": extension.digest for extension in model.extensions
    }


def handled(handling: Handling, caller: Caller) -> dict[str, Any]:
    """Return the fields of a job that say whose it is and how it is handled."""
    return {
        "priority": handling.priority,
        "tenant": caller.tenant,
        "key": caller.key,
        "expires": None if handling.expires_in is None else now() + handling.expires_in,
        "callback": callback_of(handling),
    }


def under_limit(job: Job, limit: EditLimit | None) -> Job:
    """Return the job with its tenant's limit on its own edits; policies are the operator's.

    Raises a 400 for edits that cannot be limited, and `forbidden` for a sweep.
    """
    if limit is None:
        return job
    if KINDS[job.kind].grid:
        # A patch that is scaled down would answer another question without saying so.
        detail = "sweeps patch whole rows, which the tenant's edit_limit does not allow"
        raise MidstreamError("forbidden", detail)
    steering = [
        [limited(entry, limit, "steering") if entry.owner == "request" else entry for entry in each]
        for each in job.steering
    ]
    return msgspec.structs.replace(job, steering=steering)
