"""Inspect AI's provider `midstream/<model>`: evaluates a model with steering, patches and
captures.

Inspect AI finds it through the package's entry point. See docs/coming-from.md.
"""

import hashlib
import json
import logging
import secrets
from typing import Any
from urllib.parse import urldefrag

import msgspec
from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    ModelCall,
    ModelOutput,
    RetryDecision,
    modelapi,
)

# private modules that the class below needs, hence the version pin in pyproject.toml
from inspect_ai.model._openai import openai_classify_retry
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.solver._task_state import sample_state
from inspect_ai.tool import ToolChoice, ToolInfo
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from midstream.client.sdk.calls import finish
from midstream.client.sdk.client import Client
from midstream.client.sdk.discovery import address
from midstream.client.sdk.standing import standing
from midstream.client.sdk.wire import headers, openai_body
from midstream.schemas.base.errors import MidstreamError, Translated
from midstream.schemas.jobs.openai import ChatRequest
from midstream.schemas.readings.readings import READINGS

logger = logging.getLogger(__name__)

#: Key of a sample's metadata, and of the metadata of a model's output.
KEY = "midstream"
#: Request fields that a model's arguments and a sample's metadata may set; `modules` becomes
#: entries of `steering`.
FIELDS = (
    "steering",
    "modules",
    "patch",
    "capture",
    "capture_wait",
    "probes",
    "lora",
    *READINGS,
)
#: Fields of a response that become metadata of the model's output.
ANSWERED = ("capture_results", "determinism", "probes", *READINGS)
#: HTTP statuses after which a request is retried: too many requests, or not ready. Any other error
#: status fails the sample.
RETRIED = (429, 503)


def checked(fields: Any, where: str) -> dict[str, Any]:
    """Return `fields` unchanged. Raises ValueError, naming `where` and the field, for a name not in
    `FIELDS` or an invalid value.
    """
    if not isinstance(fields, dict):
        raise ValueError(
            f"{where}: {type(fields).__name__} is not an object of {', '.join(FIELDS)}"
        )
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; valid: {', '.join(FIELDS)}")
    with Translated((MidstreamError, ValueError), lambda error: ValueError(f"{where}: {error}")):
        body_of(fields)
    return fields


def module_entries(modules: Any) -> list[dict[str, Any]]:
    """Return the entries of `steering` for a name, a list of names, or an object of name → scale.

    Raises ValueError.
    """
    if isinstance(modules, str | list):
        modules = dict.fromkeys([modules] if isinstance(modules, str) else map(str, modules), 1.0)
    if not isinstance(modules, dict):
        raise ValueError("modules: must be a name, a list of names, or an object of name and scale")
    return [{"module": name, "scale": scale} for name, scale in modules.items()]


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the request body for `fields`, as plain JSON values.

    `capture_wait` defaults to true. Raises MidstreamError, or ValueError for `modules`, naming the
    invalid field.
    """
    given = {name: value for name, value in fields.items() if name != "modules"}
    if fields.get("modules"):
        given["steering"] = [*(given.get("steering") or []), *module_entries(fields["modules"])]
    if given.get("capture") is not None:
        given.setdefault("capture_wait", True)
    body: dict[str, Any] = json.loads(msgspec.json.encode(openai_body(ChatRequest, given)))
    return body


@modelapi(name="midstream")
class MidstreamAPI(OpenAICompatibleAPI):
    """A model served by Midstream, called at the chat endpoint.

    Arguments (`-M name=value`, `get_model(…, name=value)`) are those in `FIELDS`: fields of `POST
    /v1/chat/completions`, and `modules`. A sample's metadata may replace each of them under
    `"midstream"`; `per_sample=False` ignores the metadata, as graders should. `base_url` defaults
    to the service that `Client()` finds.

    Raises ValueError naming an unknown or invalid argument.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - as in the base class
        per_sample: bool = True,
        client_timeout: float | None = None,
        **model_args: Any,
    ) -> None:
        if not isinstance(per_sample, bool):
            raise ValueError(f"per_sample: {per_sample!r} is not true or false")
        self._service: Client | None = None  # until the base class is initialised
        self._fields: dict[str, Any] = checked(
            model_args, f"model argument of midstream/{model_name}"
        )
        self._per_sample = per_sample
        service_url = urldefrag(base_url).url.rstrip("/").removesuffix("/v1") if base_url else None
        url, key = address(service_url, api_key)
        token = headers(key).get("authorization", "").removeprefix("Bearer ")
        super().__init__(
            model_name=model_name,
            base_url=f"{url}/v1",
            api_key=token or "none",
            config=config,
            service=KEY,
            client_timeout=client_timeout,
            stream=False,
            max_retries=0,  # Inspect itself retries what `should_retry` allows
        )
        self._service = Client(url, token or None)

    @property
    def base_url(self) -> str | None:
        """The endpoint's address.

        Inspect's cache uses it to tell models apart, so its fragment is a digest of everything
        except the conversation that determines an answer. If the service cannot report that, the
        fragment is random on every access, and no cached answer is used.
        """
        return (
            f"{self._address}#{self._standing()[:32]}"
            if self._service is not None
            else self._address
        )

    @base_url.setter
    def base_url(self, address: str | None) -> None:
        self._address = address

    def _standing(self) -> str:
        """Return a digest of the request's own fields, the model's identity, the content of the
        artifacts that the fields name, and global steering.
        """
        assert self._service is not None
        body = self.request_fields()
        try:
            conversation = [{"role": "user", "content": "-"}]
            request = msgspec.convert(
                body | {"model": self.service_model_name(), "messages": conversation}, ChatRequest
            )
            identity, names, steering = finish(standing(self._service._io, request))
        except (MidstreamError, msgspec.ValidationError) as error:
            logger.warning("answers are not taken from the cache: %s", error)
            return secrets.token_hex(32)
        content = [
            body,
            identity,
            sorted([*name, digest] for name, digest in names.items()),
            steering.digest,
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _create_client(self) -> AsyncOpenAI:
        return super()._create_client().with_options(base_url=self._address)

    def request_fields(self) -> dict[str, Any]:
        """Return Midstream's fields of the next request: the model's arguments, overridden by those
        of the running sample.

        Raises ValueError.
        """
        state = sample_state() if self._per_sample else None
        if state is None or state.metadata.get(KEY) is None:
            return body_of(self._fields)
        sample = state.metadata[KEY]
        return body_of(
            self._fields | checked(sample, f"metadata {KEY!r} of sample {state.sample_id!r}")
        )

    def completion_params(self, config: GenerateConfig, tools: bool) -> dict[str, Any]:
        params: dict[str, Any] = super().completion_params(config, tools)
        extra = params.get("extra_body") or {}
        request_fields = self.request_fields()
        misplaced = sorted(set(extra) & set(FIELDS))
        if misplaced:
            raise ValueError(
                f"extra_body: {misplaced[0]!r} is not valid here; set it as an argument of the "
                "model or in the sample's metadata, which are checked"
            )
        return params | ({"extra_body": extra | request_fields} if extra or request_fields else {})

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        """Generate like the base class; the output's metadata has `midstream`: the job's id and
        the answer's fields named in `ANSWERED`.
        """
        result = await super().generate(input, tools, tool_choice, config)
        output, call = result
        if isinstance(output, ModelOutput):
            response = call.response
            results = {"job": response["id"]} | {
                name: response[name] for name in ANSWERED if response.get(name) is not None
            }
            output.metadata = {**(output.metadata or {}), KEY: results}
        return result

    def handle_bad_request(self, ex: APIStatusError) -> ModelOutput | Exception:
        """Return the error, so that a rejected request fails the sample with the service's message
        and never becomes an answer of the model.
        """
        return ex

    def should_retry(self, ex: BaseException) -> bool | RetryDecision:
        """Return whether to retry: the status is in `RETRIED`, or the connection failed."""
        if isinstance(ex, APIConnectionError) or (
            isinstance(ex, APIStatusError) and ex.status_code in RETRIED
        ):
            return openai_classify_retry(ex) or RetryDecision.transient()
        return RetryDecision.no()
