"""Routes that convert between text and token ids, with the tokenizer of the model's workers."""

from litestar import Response, post
from litestar.params import JSONBody

from ...schemas.base.errors import MidstreamError, Translated, invalid
from ...schemas.jobs.jobs import Sampling, StoredPrompt
from ...schemas.jobs.models import ModelInfo
from ...schemas.prompts.selectors import (
    PositionSelector,
    RequestedPositions,
    end_position,
    select,
)
from ...schemas.prompts.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from ...schemas.requests.specs import CaptureSpec
from ..context import AppContext
from ..resolve.admission.admission import facts_of, tokenise
from ..resolve.positions.captures import Bounds, at_field, positions_of_each
from ..resolve.prompts.request_parsing import (
    ParsedPrompt,
    ParsedRequest,
    parse_conversation,
)
from ..resolve.prompts.tokenizer import Codec, TooLong, check_vocabulary
from ..web.aside import call_aside
from ..web.auth import needs
from .jobs import SUBMIT_ERRORS


@post(
    "/v1/tokenize",
    opt=needs("read"),
    status_code=200,
    summary="Tokenise text or a conversation",
    description=(
        "Uses the model's own tokenizer and chat template: a job with the same "
        "`prompt` or `messages` has these tokens. `positions` are resolved as those of a capture."
    ),
    responses=SUBMIT_ERRORS,
)
async def tokenize(data: JSONBody[TokenizeRequest], context: AppContext) -> Response[Tokenized]:
    if (data.prompt is None) == (data.messages is None):
        raise invalid("prompt", "give either prompt or messages", allowed="prompt, or messages")
    info = await context.served.the_model(data.model)
    codec = await context.served.codec(info)
    special_tokens = data.messages is None and data.add_special_tokens
    asked = ParsedPrompt("prompt", data.prompt or "")
    if data.messages is not None:
        asked = parse_conversation("messages", data.messages)
    if asked.images:
        raise invalid(
            asked.field,
            f"has {len(asked.images)} images, whose tokens only the worker knows",
            allowed="text parts",
        )
    if isinstance(data.prompt, str):
        with Translated(TooLong, lambda error: invalid("prompt", error.detail), hidden=True):
            (ids,) = await codec.encode([data.prompt], special_tokens=special_tokens)
        # without them, spans are found in what the ids decode to
        prompt = StoredPrompt(token_ids=ids, text=data.prompt if special_tokens else None)
    else:
        (prompt,) = await tokenise([asked], info, codec)
    words = await codec.read(
        prompt.token_ids,
        data.prompt if isinstance(data.prompt, str) else prompt.text,
        special_tokens=special_tokens,
    )
    tokens = len(words)
    positions = None
    generated = False
    if data.positions is not None:
        selector = await _selected(data.positions, asked, prompt, info, codec)
        positions = [*select(selector, 0, tokens, tokens)]
        generated = end_position(selector, tokens) > tokens
    return Response(
        Tokenized(
            count=tokens,
            max_model_len=info.max_model_len,
            tokens=list(prompt.token_ids),
            token_strs=words,
            positions=positions,
            generated=generated,
        )
    )


async def _selected(
    positions: RequestedPositions,
    asked: ParsedPrompt,
    prompt: StoredPrompt,
    info: ModelInfo,
    codec: Codec,
) -> PositionSelector:
    """Resolve positions in a prompt. Raises a 400 naming `positions`."""
    spec = CaptureSpec(positions=positions)
    parsed = ParsedRequest("generate", info.name, [asked], Sampling(), capture=spec)
    with (
        at_field("positions"),
        Translated(MidstreamError, lambda error: error.at("positions")),
    ):
        facts, _ = await facts_of(parsed, [prompt], info, codec)
        bounds = Bounds(info, facts, info.max_model_len)
        (selector,) = await call_aside(positions_of_each, spec, bounds)
    return selector


@post(
    "/v1/detokenize",
    opt=needs("read"),
    status_code=200,
    summary="Convert token ids to text",
    responses=SUBMIT_ERRORS,
)
async def detokenize(
    data: JSONBody[DetokenizeRequest], context: AppContext
) -> Response[Detokenized]:
    info = await context.served.model(data.model)
    check_vocabulary(data.tokens, "tokens", info)
    text, words = await (await context.served.codec(info)).decode(data.tokens)
    return Response(Detokenized(prompt=text, token_strs=words))


ROUTES = [tokenize, detokenize]
