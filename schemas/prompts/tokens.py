"""Requests and responses for tokens, in the shapes of vLLM's own `/tokenize` and `/detokenize`."""

from ..base.limits import Name, Text, TokenIds
from ..base.records import Record
from .chat import Conversation


class TokenizeRequest(Record):
    """Body of `POST /v1/tokenize`: `prompt`, or a conversation in `messages`."""

    model: Name
    prompt: Text | None = None
    messages: Conversation | None = None
    #: Add the special tokens that the model's tokenizer adds around plain text, such as BOS. A chat
    #: template writes its own.
    add_special_tokens: bool = True


class Tokenized(Record):
    """Answer of `POST /v1/tokenize`.

    `token_strs[i]` is the text of token i, leading space included.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str]


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
