"""Requests and responses for tokens, in the shapes of vLLM's own `/tokenize` and `/detokenize`."""

from ..base.limits import Name, Text, TokenIds
from ..base.records import Record
from .chat import Conversation
from .selectors import RequestedPositions


class TokenizeRequest(Record):
    """Body of `POST /v1/tokenize`: `prompt` (a text, or its token ids), or a conversation in
    `messages`.
    """

    model: Name | None = None  # null: the only served model
    prompt: Text | TokenIds | None = None
    messages: Conversation | None = None
    #: Add the special tokens that the model's tokenizer adds around plain text, such as BOS. A chat
    #: template writes its own.
    add_special_tokens: bool = True
    positions: RequestedPositions | None = None  # to resolve in the prompt, as of a capture


class Tokenized(Record, omit_defaults=True):
    """Answer of `POST /v1/tokenize`.

    `token_strs[i]` is the text of token i, leading space included. `positions`: those asked for, in
    the prompt; `generated`: whether they go on with tokens that are generated.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str]
    positions: list[int] | None = None
    generated: bool = False


class DetokenizeRequest(Record):
    """Body of `POST /v1/detokenize`."""

    model: Name
    tokens: TokenIds


class Detokenized(Record):
    """Answer of `POST /v1/detokenize`: the text, special tokens included, and the text of each
    token.
    """

    prompt: str
    token_strs: list[str]
