"""Routes that convert between text and token ids, with the tokenizer of the model's workers."""

from litestar import Response, post
from litestar.params import JSONBody

from ...schemas.base.errors import Translated, invalid
from ...schemas.jobs.jobs import StoredPrompt
from ...schemas.prompts.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from ..context import AppContext
from ..resolve.prompts.request_parsing import parse_conversation, plain_messages
from ..resolve.prompts.tokenizer import TooLong, check_vocabulary
from ..web.auth import needs
from .jobs import SUBMIT_ERRORS


@post(
    "/v1/tokenize",
    opt=needs("read"),
    status_code=200,
    summary="Tokenise text or a conversation",
    description=(
        "Uses the model's own tokenizer and chat template: a job with the same "
        "`prompt` or `messages` has these tokens."
    ),
    responses=SUBMIT_ERRORS,
)
async def tokenize(data: JSONBody[TokenizeRequest], context: AppContext) -> Response[Tokenized]:
    if (data.prompt is None) == (data.messages is None):
        raise invalid("prompt", "give either prompt or messages", allowed="prompt, or messages")
    info = await context.served.model(data.model)
    codec = await context.served.codec(info)
    special_tokens = data.messages is None and data.add_special_tokens
    with Translated(
        TooLong,
        lambda error: invalid("prompt" if data.messages is None else "messages", error.detail),
        hidden=True,
    ):
        if data.messages is not None:
            if images := parse_conversation("messages", data.messages).images:
                raise invalid(
                    "messages",
                    f"has {len(images)} images, whose tokens only the worker knows",
                    allowed="text parts",
                )
            ids, text = await codec.encode_chat(plain_messages(data.messages))
            prompt = StoredPrompt(token_ids=ids, text=text)
        else:
            assert data.prompt is not None
            (ids,) = await codec.encode([data.prompt], special_tokens=special_tokens)
            prompt = StoredPrompt(token_ids=ids, text=data.prompt)
    words = await codec.read(prompt.token_ids, prompt.text, special_tokens=special_tokens)
    return Response(
        Tokenized(
            count=len(ids), max_model_len=info.max_model_len, tokens=list(ids), token_strs=words
        )
    )


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
