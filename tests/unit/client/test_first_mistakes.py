"""Tests the messages of mistakes that new users made first."""

import socket
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from http_kit import reply, server
from job_kit import job_result

from midstream import Answer, Client, MidstreamError, ServerTimeout
from midstream.broker.ledger.jobs.ledger import not_found
from midstream.client.cli.options import overrides
from midstream.client.sdk import wire
from midstream.schemas.base.errors import invalid, unknown
from midstream.schemas.settings.settings import SettingsError, load_settings

#: An address where nothing listens.
CLOSED = "127.0.0.1:1"


def refusal(call: Callable[[], Any]) -> MidstreamError:
    with pytest.raises(MidstreamError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("error", "said"),
    [
        # with none to choose from, no value is listed
        (
            unknown("module", "joy", "tiny", []),
            "name: unknown module 'joy' of model 'tiny'; no module exists yet",
        ),
        (
            not_found("job_1"),
            "unknown job job_1; `client.jobs.list()`, `midstream list jobs` and GET /v1/jobs "
            "list jobs",
        ),
    ],
    ids=["module", "job"],
)
def test_an_unknown_name_says_where_names_are_listed(error: MidstreamError, said: str) -> None:
    assert str(error) == said


def test_a_wrong_set_option_is_not_blamed_on_the_environment() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({}, given=overrides(["kv_cache_gb=2"]))
    assert "environment" not in str(caught.value)
    assert load_settings({"MIDSTREAM_API_PORT": "1"}, given={"api_port": "2"}).api_port == 2


def test_an_address_may_omit_its_scheme() -> None:
    with server(reply({"object": "list", "data": []})) as (url, seen):
        Client(url.removeprefix("http://")).models()
    assert seen == ["GET /v1/models"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.models(),
        lambda client: client.submit(prompt="x", model="m"),
        lambda client: next(client.jobs.events("job_1")),
    ],
    ids=["call", "submission", "stream"],
)
def test_a_closed_client_says_so(ask: Callable[[Client], Any]) -> None:
    with Client(CLOSED) as client:
        pass
    assert str(refusal(lambda: ask(client))) == (
        "this client is closed; make a new one: Client(), AsyncClient()"
    )


def test_a_file_in_place_of_a_vector_is_to_be_read() -> None:
    steering = [{"layers": 3, "vector": "joy.npy"}]
    error = refusal(lambda: Client(CLOSED).submit(prompt="x", model="m", steering=steering))
    assert "; a file is read first, such as by numpy.load" in str(error)


def test_a_slow_server_is_not_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = wire.HttpCall.arguments
    monkeypatch.setattr(wire.HttpCall, "arguments", lambda call: arguments(call) | {"timeout": 0.2})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = refusal(Client(f"127.0.0.1:{silent.getsockname()[1]}").models)
    assert isinstance(slow, ServerTimeout)
    assert "did not answer in time" in slow.detail
    assert "midstream up" not in str(slow)


def test_a_traceback_ends_one_frame_below_the_callers_line() -> None:
    problem = invalid("capture", "is wrong").problem()
    with server(reply(problem, 400)) as (url, _), Client(url) as client:
        for call in (client.models, lambda: next(client.jobs.events("job_1"))):
            with pytest.raises(MidstreamError) as caught:
                call()
            frames = traceback.extract_tb(caught.value.__traceback__)
            assert len([frame for frame in frames if frame.filename != __file__]) == 1, frames
            assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("register_sae", "saes.put"),
        ("list_jobs", "jobs.list"),
        ("create_key", "keys.create"),
        ("register_module", "modules.put"),
        ("revoke_key", "keys.delete"),
        ("clear_global_steering", "global_steering.delete"),
        ("generate", "run"),
        ("completions", "completion"),
        ("adapters", "loras"),
    ],
)
def test_a_call_of_a_group_is_suggested(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean '{meant}'"):
        getattr(Client(CLOSED), name)
    assert not hasattr(Client(CLOSED), "other")


PAIRS = "give the prompts as pairs=[{'clean': …, 'corrupt': …}]"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.lens("x", layer=3), "layer: unknown field; did you mean 'layers'?"),
        (lambda c: c.attention("x", layer=3), "layer: unknown field; did you mean 'layers'?"),
        (
            lambda c: c.capture("x", layer=3),
            "layer: unknown field (allowed: job_id, folder, tag, partial)",
        ),
        (
            lambda c: next(c.jobs.events("x", afer=1)),
            "afer: unknown field; did you mean 'after'?",
        ),
        (
            lambda c: c.run(prompt="x", layer=3),
            "layer: unknown field; `capture`, `steering` and `patch` have layers",
        ),
        (
            lambda c: c.run("x", max_tokens=2),
            "request: expected a JobRequest, got str; give the text as prompt=…",
        ),
        (
            lambda c: c.submit("x"),
            "request: expected a JobRequest, got str; give the text as prompt=…",
        ),
        (lambda c: c.sweep("x"), f"request: expected a SweepRequest, got str; {PAIRS}"),
        (lambda c: c.sweep(clean="x", corrupt="y"), f"clean: unknown field; {PAIRS}"),
        (
            lambda c: c.chat(**CHAT, prompt="x"),
            "prompt: unknown field; use messages=[{'role': 'user', 'content': …}], or completion",
        ),
        (
            lambda c: c.chat(**CHAT, guided_json={}),
            "guided_json: unknown field; use structured_outputs={'json': …}",
        ),
        (
            lambda c: c.chat(**CHAT, extra_body={}),
            "extra_body: unknown field; its fields are arguments of the call",
        ),
        (
            lambda c: c.submit(prompt="x", model="m", capture={"positions": slice(1, 3)}),
            "capture.positions: Expected `str | object | array`, got `slice`; a range is given as "
            '{"start": 1, "stop": 3}',
        ),
        (
            lambda c: c.submit(prompt="x", model="m", capture={"positions": "last"}),
            "capture.positions: Invalid enum value 'last'; did you mean 'last_prompt'? (allowed: "
            "last_prompt, all_prompt, all_generated, all, image)",
        ),
        (
            lambda c: c.submit(prompt="x", model="m", capture={"layers": 3.5}),
            "capture.layers: Expected `int | str | array | null`, got `float`; layers are whole "
            "numbers",
        ),
        (
            lambda c: c.modules.put("m", [1.0, 2.0]),
            "steering[0]: Expected `object`, got `float`; a vector is given with its layers: "
            '[{"layers": 12, "vector": …}]',
        ),
        (
            lambda c: c.modules.put("my module", [{"layers": 3, "vector": [1.0]}]),
            "name: does not match the pattern [A-Za-z0-9][A-Za-z0-9._-]{0,127}; letters, digits, "
            "'.', '_' and '-', such as my-name.1",
        ),
        (
            lambda c: c.probes.put("p", weight=[1.0]),
            'layer: is required; a site is a layer and a hook, such as "layer": 12',
        ),
        (
            lambda _: Client("not a url"),
            "url: 'not a url' is no URL (allowed: such as http://127.0.0.1:8321)",
        ),
        (
            lambda c: c.chat(**CHAT, other=1),
            "other: unknown field; the reference lists its fields",
        ),
    ],
)
def test_a_wrong_argument_names_the_right_one(call: Any, message: str) -> None:
    assert str(refusal(lambda: call(Client(CLOSED)))) == message


@pytest.mark.parametrize(
    ("value", "name", "words"),
    [
        (job_result(), "text", r"no attribute 'text': use outputs\[0\]\.text$"),
        (
            Answer("job_1", ["x"], ["stop"], None, None, {}),
            "outputs",
            r"Answer has no attribute 'outputs': use texts$",
        ),
    ],
    ids=["result", "answer"],
)
def test_a_wrong_attribute_names_the_right_one(value: Any, name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(value, name)
