"""Tests the messages of nine mistakes that new users made first."""

import socket
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from http_kit import reply, server

from midstream import Client, MidstreamError, ServerTimeout, ServerUnreachable
from midstream.api.resolve.readings.readings import _check_served
from midstream.client.cli.options import overrides
from midstream.client.sdk import wire
from midstream.lens import HookedModel
from midstream.schemas.base.errors import invalid, unknown
from midstream.schemas.base.settings import SettingsError, load_settings

#: An address where nothing listens.
CLOSED = "127.0.0.1:1"


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def refusal(call: Callable[[], Any]) -> MidstreamError:
    with pytest.raises(MidstreamError) as caught:
        call()
    return caught.value


def test_what_should_be_omitted_is_no_valid_value() -> None:
    model: Any = SimpleNamespace(name="tiny", readings={"lens": "it has no unembedding"})
    error = refusal(lambda: _check_served("lens", "lens", model))
    assert (error.allowed, error.hint) == (None, "omit it")


def test_an_unknown_name_with_none_to_choose_from_lists_no_value() -> None:
    error = unknown("module", "joy", "tiny", [])
    assert str(error) == "name: unknown module 'joy' of model 'tiny'; no module exists yet"


def test_a_nested_field_is_suggested() -> None:
    error = refusal(lambda: wire.pack_capture({"hooks": {"mlp_aut": 1}}))
    assert (error.field, error.hint) == ("capture.hooks", "did you mean 'mlp_out'?")


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("kv_cache_gb=2", "--set kv_cache_gb: unknown setting; did you mean 'kv_cache_gib'?"),
        ("api_port=x", "--set api_port='x': Expected `int`"),
    ],
)
def test_a_wrong_set_option_is_not_blamed_on_the_environment(pair: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({}, given=overrides([pair]))
    assert words in str(caught.value)
    assert "environment" not in str(caught.value)
    assert load_settings({"MIDSTREAM_API_PORT": "1"}, given={"api_port": "2"}).api_port == 2


def test_an_address_may_omit_its_scheme() -> None:
    with server(reply({"object": "list", "data": []})) as (url, seen):
        Client(url.removeprefix("http://")).models()
    assert seen == ["GET /v1/models"]


@pytest.mark.parametrize(
    "given", [CLOSED, f"http://{CLOSED}/", Client(CLOSED)], ids=["host", "url", "client"]
)
def test_a_hooked_model_takes_an_address_or_a_client(given: Any) -> None:
    error = refusal(lambda: HookedModel(given))
    assert "no Midstream server answers at http://127.0.0.1:1 " in str(error)


def test_a_slow_server_is_not_a_missing_one(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = wire.Call.arguments
    monkeypatch.setattr(wire.Call, "arguments", lambda call: arguments(call) | {"timeout": 0.2})
    slow = refusal(Client(silent).models)
    assert isinstance(slow, ServerTimeout)
    assert ("did not answer in time" in slow.detail, "midstream up" in str(slow)) == (True, False)
    missing = refusal(Client(CLOSED).models)
    assert type(missing) is ServerUnreachable
    assert missing.hint == "`midstream up` starts one"


def test_a_traceback_ends_one_frame_below_the_callers_line() -> None:
    problem = invalid("capture", "is wrong").problem()
    with server(reply(problem, 400)) as (url, _), Client(url) as client:
        for call in (client.models, lambda: next(client.jobs.events("job_1"))):
            with pytest.raises(MidstreamError) as caught:
                call()
            frames = traceback.extract_tb(caught.value.__traceback__)
            inside = [frame for frame in frames if frame.filename != __file__]
            assert len(inside) == 1, frames
            assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [("register_sae", "saes.register"), ("list_jobs", "jobs.list"), ("create_key", "keys.create")],
)
def test_a_call_of_a_group_is_suggested(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean '{meant}'"):
        getattr(Client(CLOSED), name)
    assert not hasattr(Client(CLOSED), "other")


def test_a_vector_is_no_fit_of_a_probe() -> None:
    error = refusal(lambda: Client(CLOSED).probes.register("p", [1.0, 0.0]))  # type: ignore[arg-type]
    assert (error.field, error.hint) == ("fit", "a vector is passed as weight=…")
