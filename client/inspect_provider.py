"""The provider `midstream/<model>` of Inspect AI: evaluations of a model that is steered, patched
and captured.

Inspect AI finds it through the package's entry point. See docs/evaluation.md.
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

# what the class below uses: pinned in pyproject.toml
from inspect_ai.model._openai import openai_classify_retry
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.solver._task_state import sample_state
from inspect_ai.tool import ToolChoice, ToolInfo
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from ..schemas.base.errors import MidstreamError
from ..schemas.jobs.openai import ChatRequest
from ..schemas.readings.readings import FIELDS as READINGS
from .sdk.client import Client
from .sdk.discovery import address
from .sdk.wire import headers, openai_body

logger = logging.getLogger(__name__)

#: Key of a sample's metadata, and of the metadata of a model's output.
KEY = "midstream"
#: Fields of a request that a model's arguments and a sample's metadata set; `modules` is turned
#: into entries of `steering`.
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
#: Members of an answer that become metadata of the model's output.
ANSWERED = ("capture_results", "determinism", "probes", *READINGS)
#: Statuses of a service that asks for another attempt: too many requests, or not ready. Any
#: other error fails the sample.
RETRIED = (429, 503)


def checked(fields: Any, where: str) -> dict[str, Any]:
    """`fields` of `FIELDS` as given; raises ValueError naming `where` and the field for what is not
    one, or does not fit.
    """
    if not isinstance(fields, dict):
        raise ValueError(
            f"{where}: {type(fields).__name__} is not an object of {', '.join(FIELDS)}"
        )
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; valid: {', '.join(FIELDS)}")
    try:
        body_of(fields)
    except (MidstreamError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    return fields


def module_entries(modules: Any) -> list[dict[str, Any]]:
    """Entries of `steering` for a name, a list of names, or an object of name → scale.

    Raises ValueError.
    """
    if isinstance(modules, str | list):
        modules = dict.fromkeys([modules] if isinstance(modules, str) else map(str, modules), 1.0)
    if not isinstance(modules, dict):
        raise ValueError("modules: must be a name, a list of names, or an object of name and scale")
    return [{"module": name, "scale": scale} for name, scale in modules.items()]


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The request's members for `fields`, as JSON carries them.

    A capture is awaited unless `capture_wait` says otherwise.

    Raises MidstreamError, or ValueError for `modules`, naming the field that does not fit.
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
    """A model of a Midstream service, at its chat endpoint.

    Arguments (`-M name=value`, `get_model(…, name=value)`) are the members of `FIELDS`, as `POST
    /v1/chat/completions` takes them, and `modules`. The metadata of a sample may replace each under
    `"midstream"`; `per_sample=False` ignores it, as graders should. Without `base_url` the service
    is found as `Client()` finds it.

    Raises ValueError naming an argument that there is not, or that does not fit.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - as the class that it derives from
        per_sample: bool = True,
        client_timeout: float | None = None,
        **model_args: Any,
    ) -> None:
        if not isinstance(per_sample, bool):
            raise ValueError(f"per_sample: {per_sample!r} is not true or false")
        self._service: Client | None = None  # until the base class is set up
        self._fields: dict[str, Any] = checked(
            model_args, f"model argument of midstream/{model_name}"
        )
        self._per_sample = per_sample
        given = urldefrag(base_url).url.rstrip("/").removesuffix("/v1") if base_url else None
        url, key = address(given, api_key)
        result = headers(key).get("authorization", "").removeprefix("Bearer ")
        super().__init__(
            model_name=model_name,
            base_url=f"{url}/v1",
            api_key=result or "none",
            config=config,
            service=KEY,
            client_timeout=client_timeout,
            stream=False,
            max_retries=0,  # Inspect repeats what `should_retry` allows
        )
        self._service = Client(url, result or None)

    @property
    def base_url(self) -> str | None:
        """The endpoint's address.

        Inspect's cache distinguishes models by it: its fragment stands for all that decides an
        answer next to the conversation. It changes with every look where the service does not say
        that, so that nothing is taken from the cache.
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
        """Digest of the request's own members, the model's identity, the content of what they name,
        and global steering.
        """
        assert self._service is not None
        body = self.request_fields()
        try:
            conversation = [{"role": "user", "content": "-"}]
            request = msgspec.convert(
                body | {"model": self.service_model_name(), "messages": conversation}, ChatRequest
            )
            identity, names, steering = self._service._standing(request)
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
        client: AsyncOpenAI = super()._create_client().with_options(base_url=self._address)
        return client

    def request_fields(self) -> dict[str, Any]:
        """Midstream's members of the next request: the model's arguments, replaced by those of the
        sample that runs.

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
        extra, request_fields = params.get("extra_body") or {}, self.request_fields()
        twice = sorted(set(extra) & set(FIELDS))
        if twice:
            raise ValueError(
                f"extra_body: {twice[0]!r} is set by an argument of the model or the metadata "
                "of a sample, which are checked"
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
        """A refused request fails the sample with the service's text: it is never an answer of the
        model.
        """
        return ex

    def should_retry(self, ex: BaseException) -> bool | RetryDecision:
        """Return whether another attempt is asked for (`RETRIED`), or there was no connection."""
        if isinstance(ex, APIConnectionError) or (
            isinstance(ex, APIStatusError) and ex.status_code in RETRIED
        ):
            return openai_classify_retry(ex) or RetryDecision.transient()
        return RetryDecision.no()
