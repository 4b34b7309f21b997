"""Names, ops and predictions of the TransformerLens-style facade, without a server."""

from typing import Any

import msgspec
import numpy as np
import pytest
from refusal_kit import refuses

from midstream import Client
from midstream.lens import ops
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.limits import MAX_LENS_TOKENS
from midstream.schemas.jobs.jobs import JobRequest
from midstream.schemas.model.banks import RowShape
from midstream.schemas.prompts.selectors import ALIASES, EVERY, HOOKS
from midstream.schemas.readings.lens import LensReading
from midstream_bridges.lens.cache import REFUSED as OF_CACHE, ActivationCache
from midstream_bridges.lens.logits import Logits, Predictions
from midstream_bridges.lens.model import REFUSED as OF_MODEL, HookedModel, edits_of
from midstream_bridges.lens.names import (
    ABSENT,
    BLOCK,
    SHORT,
    Card,
    NamedSite,
    chosen,
    hooks_of,
    site_of,
)

WIDE = RowShape(heads=3, width=4)
HEADS = RowShape(heads=1, width=20)
CARD = Card(
    id="tiny",
    architecture="LlamaForCausalLM",
    num_layers=4,
    hidden_size=8,
    vocab_size=1000,
    max_model_len=64,
    dtype="float32",
    hooks=[hook for hook in EVERY if hook != "router"],
    inside=dict.fromkeys(("q_proj", "k_proj", "q", "k", "v", "z"), WIDE) | {"mlp_act": HEADS},
)
OUTSIDE = msgspec.structs.replace(
    CARD,
    hooks=[hook for hook in HOOKS if hook != "post_attn"],
    inside={},
    absent={"post_attn": "a parallel block"},
)


# --- Names
# --------------------------------------------------------------------------------------------------


def test_names_mean_hooks_or_have_a_reason() -> None:
    for name, hooks in BLOCK.items():
        if name in ALIASES:
            assert hooks == (ALIASES[name],)
    assert {ALIASES[name] for name in ALIASES} <= {
        hook for hooks in BLOCK.values() for hook in hooks
    }
    assert not ABSENT.keys() & {name.rpartition(".")[2] for name in BLOCK}
    assert not {f"hook_{name}" for name in SHORT} & ABSENT.keys()
    assert not [name for name in OF_CACHE if hasattr(ActivationCache, name)]
    assert not [name for name in OF_MODEL if hasattr(HookedModel, name)]


@pytest.mark.parametrize(
    "key",
    [
        "blocks.3.attn.hook_z",
        ("z", 3),
        ("z", -1),
        ("attn.hook_z", 3),
        ("z", np.int64(3), "attn"),
        ("z", 3, None),
    ],
)
def test_a_key_is_a_full_name_or_a_short_one_with_its_layer(key: Any) -> None:
    assert site_of(key, CARD) == NamedSite("attn.hook_z", 3)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("blocks.4.hook_resid_post", "layer 4 is out of range (allowed: 0 to 3)"),
        (("resid_post", -5), "layer -5 is out of range"),
        (
            "blocks.0.hook_nothing",
            "no activation is called 'hook_nothing' (allowed: hook_resid_pre,",
        ),
        ("blocks.0.attn.hook_result", "needs its weights, which are not served"),
        (("pre", 1), "mlp.hook_post"),
        ("hook_embed", "blocks.0.hook_resid_pre is their sum"),
        ("resid_post", "does not name an activation"),
        (("z", True), "does not name an activation"),
        (3, "does not name an activation"),
    ],
)
def test_a_key_that_names_nothing_is_refused_with_what_is_valid(key: Any, said: str) -> None:
    with refuses(said, field="names_filter"):
        site_of(key, CARD, "names_filter")


def test_a_hook_that_is_not_served_is_refused_with_the_servers_reason() -> None:
    for key, said in (
        (("resid_mid", 0), "post_attn is not served: a parallel block"),
        (("pattern", 0), "the worker's setting hooks"),
    ):
        with refuses(said):
            site_of(key, OUTSIDE)
    assert {site.name for site in OUTSIDE.sites()} == {
        "hook_resid_pre",
        "hook_attn_out",
        "hook_mlp_out",
        "hook_resid_post",
    }


def test_a_filter_is_a_name_several_or_a_function() -> None:
    one = [NamedSite("hook_resid_post", 1)]
    assert chosen("blocks.1.hook_resid_post", CARD) == chosen(("resid_post", 1), CARD) == one
    assert chosen([("resid_post", 1), "blocks.1.hook_resid_post"], CARD) == one
    assert chosen(lambda name: name == "blocks.1.hook_resid_post", CARD) == one
    assert chosen(None, CARD) == CARD.sites()
    assert len(CARD.sites()) == 4 * len(BLOCK)
    assert hooks_of([NamedSite("attn.hook_pattern", 2), NamedSite("attn.hook_rot_k", 1)]) == {
        "q": [2],
        "k": [1, 2],
    }
    for nothing in ([], lambda name: False):
        with pytest.raises(MidstreamError, match="names_filter: selects no activation"):
            chosen(nothing, CARD)


# --- Ops
# --------------------------------------------------------------------------------------------------


def request(*hooks: Any) -> JobRequest:
    """What is sent, as the server reads it."""
    found = edits_of(hooks, CARD)
    return msgspec.convert(
        {
            "model": "tiny",
            "prompts": ["x"],
            "steering": _plain(found["steering"]),
            "patch": _plain(found["patch"]),
        },
        JobRequest,
    )


def _plain(entries: list[dict[str, Any]]) -> Any:
    from midstream.client.values import plain
    from midstream.schemas.requests.specs import PatchSpec, SteeringSpec

    kind = list[SteeringSpec] if entries and "source" not in entries[0] else list[PatchSpec]
    return msgspec.to_builtins(plain(entries, kind))


POST = "blocks.2.hook_resid_post"


def test_ops_become_entries_of_the_request() -> None:
    sent = request(
        (POST, ops.add(np.ones(8), scale=2.0, pos=-1)),
        (POST, ops.ablate(np.ones(8))),
        (POST, ops.clamp(np.ones(8), low=1.0)),
    )
    add, ablate, clamp = sent.steering
    assert add.op is None
    assert add.layers == 2
    assert add.hook == "post_block"
    assert add.positions == [-1]
    assert add.scale == 2.0
    assert ablate.op == "ablate"
    assert ablate.positions == "all"
    assert ablate.strength == 1.0
    assert clamp.op == "clamp"
    assert clamp.low == 1.0
    assert clamp.high is None
    sent = request(
        (("z", 1), ops.zero(heads=[2])),
        (("post", 0), ops.replace(np.ones(20), dims="0-3", pos=slice(2, None))),
    )
    zeros, ones = sent.patch
    assert zeros.hook == "z"
    assert zeros.heads == [2]
    assert zeros.source.zeros
    assert zeros.positions == "all"
    assert ones.hook == "mlp_act"
    assert ones.mask == "0-3"
    assert ones.positions.start == 2
    assert ones.positions.stop is None  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(3, 8), (1, 3, 8)])
def test_rows_of_several_positions_are_patches_of_one_each(shape: tuple[int, ...]) -> None:
    rows = np.arange(24, dtype=np.float32).reshape(shape)
    for pos, wanted in ((None, [[0], [1], [2]]), ([5, 1, -1], [[5], [1], [-1]])):
        found = edits_of([(POST, ops.replace(rows, pos=pos))], CARD)["patch"]
        assert [entry["positions"] for entry in found] == wanted
        assert np.array_equal(
            np.stack([entry["source"]["vector"] for entry in found]), rows.reshape(3, 8)
        )


def test_ops_of_one_kind_at_one_activation_are_sent_in_their_order() -> None:
    hooks = [(("resid_post", 1), ops.add(np.full(8, value))) for value in (1.0, 2.0)]
    assert [entry["vector"][0] for entry in edits_of(hooks, CARD)["steering"]] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("pos", "written"),
    [
        (slice(None), {"start": 0}),
        (slice(None, 3), {"start": 0, "stop": 3}),
        (slice(-3, None), {"start": -3}),
        (-1, [-1]),
        (None, "all"),
    ],
)
def test_positions_are_written_as_requests_take_them(pos: Any, written: Any) -> None:
    assert ops.add(np.ones(8), pos=pos).fields["positions"] == written


def test_rows_by_head_are_joined() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    found = edits_of([(("z", 0), ops.replace(values))], CARD)["patch"]
    assert np.array_equal(found[1]["source"]["vector"], values[1].ravel())
    (alone,) = edits_of([(("z", 0), ops.add(np.ones(4), heads=1))], CARD)["steering"]
    assert alone["vector"].shape == (4,)


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ([(POST, lambda rows, hook: rows)], "fwd_hooks[0]: is a Python function"),
        ([(POST, np.ones(8))], "is a ndarray"),
        ([POST], "is not a pair"),
        (
            [(POST, ops.add(np.ones(7)))],
            "shape [7] cannot be split into rows of this activation (allowed: rows of shape [8])",
        ),
        ([(POST, ops.add(np.ones((2, 8))))], "takes one vector, not 2"),
        ([(POST, ops.replace(np.ones((2, 8)), pos=[1]))], "2 rows need as many positions"),
        (
            [(POST, ops.replace(np.ones((2, 8)), pos="last_prompt"))],
            "2 rows need as many positions",
        ),
        (
            [(POST, ops.ablate(np.ones(8))), (POST, ops.add(np.ones(8)))],
            "ops.add is always applied before ops.ablate",
        ),
        (
            [(POST, ops.add(np.ones(8))), (POST, ops.zero())],
            "ops.zero is always applied before ops.add",
        ),
        ([(POST, ops.attend({0: np.eye(3)}))], "ops.attend cannot edit hook_resid_post"),
        (
            [(("pattern", 0), ops.zero())],
            "ops.zero cannot edit attn.hook_pattern (allowed: ops.attend)",
        ),
    ],
)
def test_what_cannot_be_edited_so_is_refused_by_its_number(hooks: list[Any], said: str) -> None:
    with refuses(said):
        edits_of(hooks, CARD)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ops.add([1.0, float("nan")]),
        lambda: ops.add("text"),
        lambda: ops.add(3.0),
        lambda: ops.add(np.ones(8), pos=1.5),
        lambda: ops.zero(pos=slice(0, 8, 2)),
        lambda: ops.patch({"no": "cache"}),
        lambda: ops.attend({}),  # type: ignore[arg-type]
    ],
)
def test_an_op_checks_its_arguments(make: Any) -> None:
    with pytest.raises(MidstreamError):
        make()


# --- Predictions
# --------------------------------------------------------------------------------------------------


class Server:
    """Knows of every row a log-probability of every token, and counts what it is asked."""

    def __init__(self, vocab: int = 1000):
        self.table = np.random.default_rng(1).standard_normal((2, 12, vocab)).astype(np.float32)
        self.asked: list[tuple[int, list[int], int, list[int]]] = []

    def __call__(
        self, prompt: int, positions: list[int], top: int, tokens: list[int]
    ) -> LensReading:
        assert len(tokens) <= MAX_LENS_TOKENS
        self.asked.append((prompt, positions, top, tokens))
        order = [np.argsort(-self.table[prompt, position])[:top] for position in positions]
        return LensReading(
            request=0,
            hook="post_block",
            layers=[3],
            positions=positions,
            token_ids=[0] * len(positions),
            top_tokens=[[row.tolist() for row in order]],
            top_logprobs=[
                [
                    self.table[prompt, position][row].tolist()
                    for position, row in zip(positions, order, strict=True)
                ]
            ],
            named_tokens=tokens,
            named_logprobs=[
                [self.table[prompt, position][tokens].tolist() for position in positions]
            ],
        )


def logits(length: int = 12, limit_kib: int = 256) -> tuple[Logits, Server]:
    server = Server()
    prompts = [list(range(100 * number, 100 * number + length)) for number in range(2)]
    return Logits(Predictions(server, prompts, 1000, limit_kib)), server


@pytest.mark.parametrize(
    "key",
    [
        (0, -1, 7),
        (0, -1, [7, 900]),
        (slice(None), -1, 7),
        (1, slice(2, 5), [3]),
        (..., 7),
        (0, ..., -1),
        (slice(None), [0, 3], 5),
        ([0, 1], [2, 3], [4, 5, 6]),
        (0, 0, slice(10, 14)),
        (0, 0, [-1000, 999]),
    ],
)
def test_indexing_gives_what_numpy_would(key: Any) -> None:
    found, server = logits()
    part = found[key]
    places = np.arange(24).reshape(2, 12)
    whole = server.table.reshape(24, 1000)
    if key[0] is Ellipsis:
        key = (slice(None), slice(None), key[1])
    elif key[1] is Ellipsis:
        key = (0, slice(None), key[2])
    *lead, last = key
    assert np.array_equal(part, whole[places[tuple(lead)]][..., last])


def test_parts_are_logits_or_probabilities_and_their_indices_count_from_the_part() -> None:
    found, server = logits()
    part = found[1, 3:6]
    assert part.shape == (3, 1000)
    with pytest.raises(IndexError):
        found[0, 0, 0, 0]
    assert np.array_equal(part[-1][[5, 6]], server.table[1, 5, [5, 6]])
    assert np.array_equal(part.softmax()[0, 5], np.exp(server.table[1, 3, 5]))
    assert np.array_equal(part.log_softmax(-1)[0, 5], server.table[1, 3, 5])
    values, ids = part.topk(4)
    assert np.array_equal(ids, np.argsort(-server.table[1, 3:6], axis=-1)[:, :4])
    assert np.array_equal(values, np.take_along_axis(server.table[1, 3:6], ids, -1))
    assert np.array_equal(found.argmax(), server.table.argmax(-1))
    assert found[0, 0].argmax() == server.table[0, 0].argmax()
    part = found.softmax()[1][2:4]
    assert part[-1, 7] == pytest.approx(np.exp(server.table[1, 3, 7]))
    assert found.softmax().log_softmax()[0, 0, 7] == server.table[0, 0, 7]


def test_what_is_known_is_not_replaced_by_less() -> None:
    found, server = logits()
    wanted = found[0, 0].topk(5)[1].tolist()
    found[0, 0, 7]  # comes with the one most likely token
    assert found[0, 0].topk(5)[1].tolist() == wanted
    assert len(server.asked) == 2


def test_only_what_is_not_known_is_asked_for() -> None:
    found, server = logits()
    for _ in range(2):
        found[0, -1, [7, 8]]
    assert server.asked == [(0, [11], 1, [7, 8])]
    found[0, [10, 11], [8, 9]]
    assert server.asked[1:] == [(0, [10, 11], 1, [8, 9])]
    found[0, [9, 10, 11], 8]
    assert server.asked[2:] == [(0, [9], 1, [8])]
    found[:, -1].topk(5)
    assert len(server.asked) == 5
    found[1, -1].topk(3)
    assert len(server.asked) == 5


def test_requests_keep_to_the_limits_of_tokens_and_bytes() -> None:
    found, server = logits(limit_kib=1)
    assert found[0, :, list(range(150))].shape == (12, 150)
    assert max(len(tokens) for *_, tokens in server.asked) == MAX_LENS_TOKENS
    assert all(
        len(positions) * (14 + 8 * (top + len(tokens))) <= 1024
        for _, positions, top, tokens in server.asked
    )


def test_the_loss_is_that_of_each_next_token() -> None:
    found, server = logits()
    wanted = -np.stack(
        [
            server.table[number, np.arange(11), np.arange(1, 12) + 100 * number]
            for number in range(2)
        ]
    )
    assert np.array_equal(found.loss(per_token=True), wanted)
    assert found.loss() == pytest.approx(wanted.mean())
    with pytest.raises(MidstreamError, match="loss: needs whole prompts"):
        found[0].loss()


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda each: np.asarray(each), "whole rows of logits do not leave the server"),
        (lambda each: each[0, 0, 1000], "a token id is out of range"),
        (lambda each: each[0, 0, " Paris"], "are not token ids"),
        (lambda each: each[0, 0, 1.5], "are not token ids"),
        (lambda each: each[0, 0, 0:500], "the slice has 500 tokens"),
        (lambda each: each.topk(101), "k: 101 is out of range (allowed: 1 to 100)"),
        (lambda each: each.softmax(0), "dim: 0 is not the axis of tokens"),
        (lambda each: each.backward(), "there are no gradients"),
    ],
)
def test_what_logits_cannot_give_is_refused(use: Any, said: str) -> None:
    with refuses(said):
        use(logits()[0])


#: An address where nothing listens.
CLOSED = "127.0.0.1:1"


@pytest.mark.parametrize(
    "given", [CLOSED, f"http://{CLOSED}/", Client(CLOSED)], ids=["host", "url", "client"]
)
def test_a_hooked_model_takes_an_address_or_a_client(given: Any) -> None:
    with pytest.raises(MidstreamError, match="no Midstream server answers at http"):
        HookedModel(given)
