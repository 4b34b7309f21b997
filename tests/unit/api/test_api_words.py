"""Do the small readers of the HTTP edge understand what clients write, and say what they do not?"""

from typing import Any, get_args

import msgspec
import pytest
from refusal_kit import refuses

from midstream.api.responses.events import resume_point
from midstream.api.responses.openai_shapes import ChoicePart, WantedParts
from midstream.api.responses.outcome import matches
from midstream.api.responses.sent import Sent
from midstream.api.routes.captures import layers_of
from midstream.api.routes.jobs import preferred_wait
from midstream.api.web.problems import malformed
from midstream.schemas.base.dtypes import RowDType
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.base.states import ENDS
from midstream.schemas.jobs.jobs import CallDelta, Event, JobRequest
from midstream.schemas.jobs.openai import ChatRequest, CompletionRequest
from midstream.schemas.prompts.selectors import ALIASES, EVERY
from midstream.schemas.requests.interventions import STEERING_FIELDS
from midstream.schemas.requests.policies import PolicyRequest
from midstream_lab.records.doses import DoseRequest
from midstream_lab.records.sweeps import SweepRequest


def problem_of(body: str | bytes, kind: Any = JobRequest) -> MidstreamError:
    """What is answered to a body that cannot be read."""
    with pytest.raises(msgspec.DecodeError) as found:
        from_json(body, kind)
    return malformed(found.value, kind)


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ('{"model":1,"prompts":["a"]}', "model", "Expected `str`"),
        ('{"prompts":["a"]}', "model", "is required"),
        ('{"model":"m","prompts":["a"],"x":1}', "x", "unknown field"),
        ('{"model":"m","prompts":["a"],"capture":{"x":1}}', "capture.x", "unknown field"),
        (
            '{"model":"m","prompts":["a"],"capture":{"hooks":{"x":1}}}',
            "capture.hooks",
            "Invalid enum value 'x'",
        ),
        (
            '{"model":"m","prompts":["a"],"probes":[{"probe":"p","action":"stp"}]}',
            "probes[0].action",
            "Invalid enum value 'stp'",
        ),
        (
            '{"model":"m","prompts":["a"],"lens":{"at":"behind"}}',
            "lens.at",
            "Invalid enum value 'behind'",
        ),
        ('{"model":"m","prompts":["a"],"capture":{"hooks":{}}}', "capture", "hooks is empty"),
        (
            '{"model":"m","prompts":["a"],"capture":{"hooks":{"pre_attn":1},"layers":1}}',
            "capture",
            "not both",
        ),
        (
            '{"model":"m","prompts":["a"],"capture":{"positions":[{"text":""}]}}',
            "capture.positions[0]",
            "text is empty",
        ),
        ('{"model":"m","prompts":[[1,null]]}', "prompts[0][1]", "Expected `int`"),
        ('{"model":"m","prompts":["a"],"metadata":{"k":1}}', "metadata[...]", "Expected `str`"),
        ("[]", None, "Expected `object`"),
        ("{", None, "not JSON"),
    ],
)
def test_decoding_errors_become_problems_with_the_field_path(
    body: str, field: str | None, said: str
) -> None:
    error = problem_of(body)
    assert error.status == 400
    assert error.field == field
    assert said in error.detail


def test_a_wrong_name_lists_the_objects_that_may_stand_in_its_place() -> None:
    body = '{"probe":"p","condition":{"at_least":1},"actions":["webhook"]}'
    allowed = problem_of(body, PolicyRequest).allowed or ""
    assert allowed.startswith('flag, stop, {"action": "steer", …}, ')
    assert '{"action": "webhook", …}' in allowed


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"capture": {"hook": "pre_mlp"}}, ", ".join(EVERY)),
        ({"capture": {"hooks": {"pre_mlp": 0}}}, ", ".join(EVERY)),
        ({"capture": {"positions": "first"}}, "last_prompt, all_prompt, all_generated, all, image"),
        ({"capture": {"dtype": "float8"}}, ", ".join(get_args(RowDType))),
        ({"capture": {"tag": "../x"}}, None),
        (
            {
                "patch": [
                    {"layers": 0, "hook": "resid", "positions": [0], "source": {"zeros": True}}
                ]
            },
            ", ".join(EVERY),
        ),
        ({"priority": "urgent"}, "high, normal, low"),
        (
            {"callback_events": ["job.done"]},
            ", ".join(("job.running", "job.flagged", "job.decided", *ENDS)),
        ),
        (
            {
                "steering": [
                    {
                        "layers": 0,
                        "vector": {"dtype": "float32", "shape": [0], "data": ""},
                        "op": "mul",
                    }
                ]
            },
            ", ".join(STEERING_FIELDS),
        ),
    ],
)
def test_unknown_names_are_refused_with_the_valid_ones(
    fields: dict[str, Any], allowed: str | None
) -> None:
    assert problem_of(to_json({"model": "m", "prompts": ["a"], **fields})).allowed == allowed


@pytest.mark.parametrize(
    ("kind", "fields", "field", "meant"),
    [
        (JobRequest, {"captures": {}}, "captures", "capture"),
        (JobRequest, {"capture": {"lyers": 1}}, "capture.lyers", "layers"),
        (JobRequest, {"capture": {"hook": "resid_prr"}}, "capture.hook", "resid_pre"),
        (JobRequest, {"capture": {"hooks": {"mlp_aut": 1}}}, "capture.hooks", "mlp_out"),
        (
            JobRequest,
            {"capture": {"positions": [0, {"txt": "a"}]}},
            "capture.positions[1].txt",
            "text",
        ),
        (JobRequest, {"sampling": {"max_token": 1}}, "sampling.max_token", "max_tokens"),
        (JobRequest, {"priority": "hgh"}, "priority", "high"),
        (JobRequest, {"callback_events": ["job.suceeded"]}, "callback_events[0]", "job.succeeded"),
        (JobRequest, {"patch": [{"source": {"rn": "x"}}]}, "patch[0].source.rn", "run"),
        (JobRequest, {"messages": [[{"rol": "user"}]]}, "messages[0][0].rol", "role"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "txt", "text": "a"}]}]},
            "messages[0].content[0].type",
            "text",
        ),
        (
            ChatRequest,
            {"response_format": {"type": "json_schem"}},
            "response_format.type",
            "json_schema",
        ),
        (SweepRequest, {"pairs": [{"clean": "a", "fiol": "b"}]}, "pairs[0].fiol", "foil"),
        (
            SweepRequest,
            {"pairs": [{"spans": [{"name": "a", "cleen": "b"}]}]},
            "pairs[0].spans[0].cleen",
            "clean",
        ),
        (SweepRequest, {"positions": "last_promt"}, "positions", "last_prompt"),
        (
            SweepRequest,
            {"path": {"receivers": [{"hook": "mlp_on"}]}},
            "path.receivers[0].hook",
            "mlp_in",
        ),
    ],
)
def test_a_misspelt_name_at_any_depth_gets_a_hint(
    kind: Any, fields: dict[str, Any], field: str, meant: str
) -> None:
    error = problem_of(to_json(fields), kind)
    assert error.field == field
    assert error.hint == f"did you mean {meant!r}?"
    assert {meant, ALIASES.get(meant)} & set((error.allowed or "").split(", "))


LAYER_3 = "hooks name a place, layers a number: such as post_block, layers=3"
AT_LEAST = "did you mean 'at_least'?"
NO_NUMBER = "it is text: send a number"
STEER = 'such as {"action": "steer", "module": …}'
POLICY = {"probe": "p", "condition": {"at_least": 1}, "actions": []}
MODULE = 'a module is named as [{"module": NAME}]'


@pytest.mark.parametrize(
    ("kind", "fields", "field", "hint"),
    [
        *(
            (kind, {"extra_body": {}}, "extra_body", "extra_body belongs to the openai client: ")
            for kind in (JobRequest, ChatRequest)
        ),
        *(
            (JobRequest, {"steering": [{word: 5}]}, f"steering[0].{word}", "did you mean 'scale'?")
            for word in ("coeff", "coefficient", "multiplier")
        ),
        (
            PolicyRequest,
            {"actions": [{"action": "steer", "strength": 2}]},
            "actions[0].strength",
            "did you mean 'scale'?",
        ),
        *(
            (JobRequest, {word: 1}, word, "it is a field of `sampling`")
            for word in ("max_tokens", "temperature")
        ),
        (PolicyRequest, {"condition": {"threshold": 2}}, "condition.threshold", AT_LEAST),
        (PolicyRequest, {"state": "active"}, "state", "did you mean 'mode'?"),
        (PolicyRequest, {"actions": ["steer"]}, "actions[0]", STEER),
        (
            PolicyRequest,
            {"condition": {"schedule": "all"}},
            "condition.schedule",
            'such as {"tokens": "all"}',
        ),
        (PolicyRequest, POLICY | {"share": 0.5}, "share", None),
        (PolicyRequest, POLICY | {"actions": ["flag", "flag"]}, "actions", None),
        (
            JobRequest,
            {"steering": [{"limit": 0.3}]},
            "steering[0].limit",
            'such as {"relative": 0.3}',
        ),
        (ChatRequest, {"policy": "p"}, "policy", "did you mean 'policies'?"),
        (
            JobRequest,
            {"steering": [{"op": "subtract"}]},
            "steering[0].op",
            "use op 'add' with a negative scale",
        ),
        (JobRequest, {"capture": {"hook": "model.layers.3"}}, "capture.hook", LAYER_3),
        (SweepRequest, {"hooks": ["transformer.h.3.mlp"]}, "hooks[0]", LAYER_3),
        (
            JobRequest,
            {"capture": {"hooks": {"blocks.3.attn.hook_z": "all"}}},
            "capture.hooks",
            "hooks name a place, layers a number: attn.hook_z, layers=3",
        ),
        (
            JobRequest,
            {"capture": {"hook": "hook_embed"}},
            "capture.hook",
            "not served; resid_pre of layer 0 is the embedding",
        ),
        (JobRequest, {"steering": [{"scale": "5"}]}, "steering[0].scale", NO_NUMBER),
        (JobRequest, {"sampling": {"max_tokens": "5"}}, "sampling.max_tokens", NO_NUMBER),
        (
            JobRequest,
            {"steering": [{"vector": "AACAPw=="}]},
            "steering[0].vector",
            'such as {"dtype": "float32", "shape": [2], "data": BASE64}, or a list of numbers',
        ),
        (JobRequest, {"steering": "joy"}, "steering", MODULE),
        (JobRequest, {"steering": ["joy"]}, "steering[0]", MODULE),
        (JobRequest, {"steering": {"module": "joy"}}, "steering", "send a list, also of one"),
        (JobRequest, {"prompts": "a"}, "prompts", "send a list, also of one"),
        *(
            (kind, fields, "".join(fields), "send a list, also of one")
            for kind, fields in ((SweepRequest, {"positions": -1}), (ChatRequest, {"messages": {}}))
        ),
        (JobRequest, {"patch": [{"positions": -1}]}, "patch[0].positions", "send a list, also of"),
        *(
            (
                JobRequest,
                {"capture": {"hooks": written}},
                "capture.hooks",
                "hooks have layers, such",
            )
            for written in ("resid_pre", ["resid_pre"])
        ),
        (
            JobRequest,
            {"messages": [{"role": "user", "content": "a"}]},
            "messages[0]",
            'send a list of conversations: [[{"role": ',
        ),
        (
            ChatRequest,
            {"messages": ["hello"]},
            "messages[0]",
            'such as [{"role": "user", "content"',
        ),
        (
            CompletionRequest,
            {"prompt": [{"role": "user", "content": "a"}]},
            "prompt[0]",
            "messages go to /v1/chat/completions (client.chat)",
        ),
        (JobRequest, {"model": 5}, "model", None),
        *(
            (JobRequest, {"capture": {"positions": written}}, f"capture.positions{at}", hint)
            for written, at, hint in (
                ({"message": -1}, ".message", "did you mean 'turn'?"),
                ("user", "", 'a role is given as {"role": "user"}'),
                ("turn=-1", "", 'write {"turn": -1}'),
                ("role=user", "", 'write {"role": "user"}'),
                (["all_generated"], "[0]", "a name stands alone, not in a list: use two entries"),
                ("last:2", "", 'a range is given as {"start": -2} or {"stop": 2}'),
            )
        ),
        *(
            (JobRequest, {"steering": [{"trigger": written}]}, f"steering[0].trigger{at}", hint)
            for written, at, hint in (
                ("a", "", 'a text is given as {"text": "</think>", "after": "end"}'),
                ({"token_ids": [198]}, ".token_ids[0]", "each item is a list of ids: [[198]]"),
            )
        ),
        (DoseRequest, {"effect": " good"}, "effect", 'such as {"target": " good"}'),
    ],
)
def test_what_newcomers_write_gets_advice(
    kind: Any, fields: dict[str, Any], field: str, hint: str | None
) -> None:
    error = problem_of(to_json({"model": "m"} | fields), kind)
    assert error.field == field
    assert (error.hint and error.hint[: len(hint or "")]) == hint


def test_a_name_or_a_number_is_said_to_be_valid_where_both_are() -> None:
    error = problem_of(to_json({"steering": [{"trigger": {"after": "start"}}]}), JobRequest)
    assert error.field == "steering[0].trigger.after"
    assert error.allowed == "a number, end"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("wait=5", 5),
        ("respond-async, wait=10", 10),
        ("wait=3, respond-async", 3),
        ('wait="7"', 7),
        (" wait = 2 ", 2),
        ("respond-async", None),
        ("wait=-1", None),
        ("wait=1e3", None),
        ("wait", None),
        ("waiting=3", None),
    ],
)
def test_prefer_is_read_as_rfc_7240_writes_it(header: str | None, seconds: float | None) -> None:
    assert preferred_wait(header) == seconds


@pytest.mark.parametrize(
    ("header", "same"),
    [
        (None, False),
        ('"3"', True),
        ('W/"3"', True),
        ('"1", "3"', True),
        ("*", True),
        ('"33"', False),
        ("3", False),
        ("", False),
    ],
)
def test_if_none_match_is_compared_weakly(header: str | None, same: bool) -> None:
    assert matches(header, '"3"') is same


@pytest.mark.parametrize(
    ("text", "layers"), [("3", [3]), ("3,7", [3, 7]), ("3-5,9", [3, 4, 5, 9]), (" 1 , 1 ", [1])]
)
def test_layers_are_read_as_numbers_and_ranges(text: str, layers: list[int]) -> None:
    assert layers_of(text, [*range(10)]) == layers


@pytest.mark.parametrize("text", [None, "all"])
def test_without_a_choice_all_captured_layers_are_read(text: str | None) -> None:
    assert layers_of(text, [2, 5]) == [2, 5]


@pytest.mark.parametrize("text", ["", "a", "-1", "5-3", "1-", "0-999999", "1,,2", "٣" * 7])
def test_layers_that_cannot_be_read_are_refused_by_name(text: str) -> None:
    with refuses(field="layers"):
        layers_of(text, [*range(10)])


@pytest.mark.parametrize(("header", "after"), [(None, "0-0"), ("", "0-0"), ("17-3", "17-3")])
def test_a_stream_resumes_after_the_last_event_id(header: str | None, after: str) -> None:
    assert resume_point(header) == after


@pytest.mark.parametrize("header", ["x", "17-", "17-3 COUNT 1", "-1", "17-99999999999999999999"])
def test_event_ids_are_checked_before_they_reach_redis(header: str) -> None:
    with refuses(field="Last-Event-ID"):
        resume_point(header)


def said(sent: Sent, text: str) -> str:
    return sent.unsent(Event(event="token", data={"index": 0, "text": text}), WantedParts()).text


def test_a_second_attempt_resends_no_text_and_may_not_contradict() -> None:
    sent = Sent()
    assert said(sent, "he") == "he"
    assert said(sent, "llo") == "llo"
    sent.restart()
    assert said(sent, "hel") == ""
    assert said(sent, "lo w") == " w"
    assert said(sent, "orld") == "orld"
    assert sent.upto(ChoicePart("hello world!"), WantedParts()).text == "!"
    sent = Sent()
    said(sent, "hello")
    sent.restart()
    with refuses("restarted"):
        said(sent, "help")


def test_a_second_attempt_does_not_resend_calls_or_tokens() -> None:
    """The parts of another attempt are cut elsewhere; a call's name and the log-probability of a
    token come once.
    """
    token = {"token_id": 5, "token": "x", "logprob": -1.0}
    call = {"index": 0, "id": "c", "name": "f"}
    sent = Sent()
    wanted = WantedParts(logprobs=0)

    def event(ids: list[int], *calls: dict[str, Any]) -> Event:
        delta = {"calls": list(calls)}
        return Event(
            event="token",
            data={
                "index": 0,
                "text": "",
                "delta": delta,
                "token_ids": ids,
                "logprobs": [token] * len(ids),
            },
        )

    first = sent.unsent(event([5], {**call, "arguments": '{"a'}), wanted)
    assert first.ids == [5]
    assert len(first.logprobs) == 1
    assert first.calls[0].name == "f"
    assert first.calls[0].arguments == '{"a'
    sent.restart()
    assert not sent.unsent(event([], call), wanted)
    again = sent.unsent(event([5, 5], {"index": 0, "arguments": '{"a":1}'}), wanted)
    assert again.ids == [5]
    assert len(again.logprobs) == 1
    assert again.offset == 1
    assert again.calls == [CallDelta(index=0, arguments='":1}')]
