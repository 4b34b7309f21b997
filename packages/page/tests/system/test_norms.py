"""Are a capture's norms and cosines those of numpy over the downloaded rows, for their tenant
alone, and bounded?
"""

import fcntl
import json
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import msgspec
import numpy as np
import pytest
from capture_kit import HIDDEN, finished, write
from edge import Api, Hand
from tenant_kit import Caller

from midstream.client import CaptureReader
from midstream.schemas.base.limits import MAX_NORM_BYTES, MAX_NORM_ROWS, MAX_NORM_VALUES
from midstream.schemas.base.records import to_json
from midstream.schemas.base.tensors import from_numpy
from midstream_page.state import MEASURED_OF_TENANT

HOOKS: dict[str, list[int]] = {"pre_attn": [1], "post_block": [0, 1, 2, 3]}
SHARES: list[dict[str, list[int]]] = [
    {"pre_attn": [1], "post_block": [0, 1]},
    {"post_block": [2, 3]},
]
POSITIONS = [0, 1, 2, 5, 6]


@pytest.fixture
def narrow(api: Api) -> Iterator[Hand]:
    """A worker by hand of two stages, whose model has rows as wide as those of `capture_kit`."""
    with Hand(api.settings, ranks=[(0, 0), (0, 1)], hidden_size=HIDDEN) as hand:
        yield hand


def rows_like(seed: int) -> Any:
    """Buffers of bfloat16 rows with every bit pattern's share of chance, some of which are not
    finite.
    """

    def rows(hook: str, layer: int) -> list[memoryview]:
        dice = np.random.default_rng([seed, layer, len(hook)])
        numbers = dice.normal(0, 10.0 ** dice.integers(-3, 4), (len(POSITIONS), HIDDEN)).astype(
            np.float32
        )
        numbers[1] = 0
        numbers[2, 0] = [np.nan, np.inf, 3e38, 1][layer]
        numbers[2, 1] = 3e38
        return [memoryview((numbers.view(np.uint32) >> 16).astype("<u2").tobytes())]

    return rows


def captured(
    api: Api, hand: Hand, layout: str = "packed", prompts: int = 2, tag: str = "mine"
) -> str:
    hooks: dict[str, Any] = {"pre_attn": [1], "post_block": "all"}
    claim = hand.claim(
        api.submit(prompts=["hello there"] * prompts, capture={"hooks": hooks, "tag": tag})
    )
    hand.store(claim)
    for request in range(prompts):
        for pp, sites in enumerate(SHARES):
            capture = finished(
                claim.job.id,
                request,
                sites,
                POSITIONS,
                all_sites=HOOKS,
                pp=pp,
                stages=2,
                layout=layout,
                tag=tag,
                rows=rows_like(request),
                attempt=claim.attempt,
                prompt_tokens=3,
                token_ids=[1, 2, 3, 4, 5],
            )
            files = write(
                hand.settings.capture_root, capture, owner=f"hand.{claim.job.id}.{request}.{pp}"
            )
            hand.receipt(claim, request, rank=pp, files=files)
    return claim.job.id


def norms(api: Api, job_id: str, status: int = 200, **parameters: Any) -> dict[str, Any]:
    answer = api.http.get(f"/v1/captures/{job_id}/norms", params=parameters)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def module(by: Api | Caller, name: str, *entries: tuple[Any, np.ndarray, dict[str, Any]]) -> None:
    steering = [
        {"layers": layers, "vector": json.loads(to_json(from_numpy(vector))), **more}
        for layers, vector, more in entries
    ]
    answer = by.http.put(f"/v1/artifacts/modules/{name}", json={"steering": steering})
    assert answer.status_code in (200, 201), answer.text


def float32(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float32)


def finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.float32(np.nan))


@pytest.mark.parametrize("layout", ["packed", "per_file", "segment"])
def test_norms_and_cosines_are_numpys_of_the_download(api: Api, narrow: Hand, layout: str) -> None:
    job_id = captured(api, narrow, layout)
    vector = np.random.default_rng(3).normal(size=HIDDEN).astype(np.float32)
    module(api, "sea", ([1, 3], vector, {}))
    found = norms(api, job_id, request=1, module="sea")
    reader = CaptureReader.from_bytes(
        api.http.get(f"/v1/captures/{job_id}/safetensors", params={"request": 1}).content
    )
    assert found["hook"] == "post_block"
    assert found["layers"] == [0, 1, 2, 3]
    assert found["positions"] == POSITIONS
    assert found["token_ids"] == [1, 2, 3, 4, 5]
    assert found["tokens"] == ["<bos>", "hello", "there", "world", "user"]
    assert found["hooks"] == list(HOOKS)
    assert found["requests"] == [0, 1]
    assert found["prompt_tokens"] == 3
    assert found["width"] == HIDDEN
    assert [cosines is None for cosines in found["cosines"]] == [True, False, True, False]
    for layer in range(4):
        rows = reader.array(layer, "post_block", 1)
        with np.errstate(all="ignore"):
            lengths = np.linalg.norm(rows, axis=1)
            cosines = (rows * vector).sum(axis=1) / (lengths * np.linalg.norm(vector))
        np.testing.assert_array_equal(float32(found["norms"][layer]), finite(lengths))
        if layer in (1, 3):
            np.testing.assert_array_equal(float32(found["cosines"][layer]), finite(cosines))
    assert found["norms"][0][2] is None  # it has a NaN
    assert found["norms"][0][1] == 0
    assert found["cosines"][1][1] is None  # of a row of zeros there is no cosine


def test_rows_layers_and_hooks_may_be_chosen(api: Api, narrow: Hand) -> None:
    job_id = captured(api, narrow)
    whole = norms(api, job_id)
    part = norms(api, job_id, layers="1-2", start=1, count=3)
    assert part["rows"] == 5
    assert part["start"] == 1
    assert part["positions"] == POSITIONS[1:4]
    assert part["layers"] == [1, 2]
    assert part["norms"] == [layer[1:4] for layer in whole["norms"][1:3]]
    assert norms(api, job_id, start=5)["norms"] == [[], [], [], []]
    assert norms(api, job_id, hook="resid_pre")["layers"] == [1]


def test_one_layers_vector_is_compared_with_all_layers(api: Api, narrow: Hand) -> None:
    job_id = captured(api, narrow)
    vectors = np.eye(HIDDEN, dtype=np.float32)
    module(
        api,
        "two",
        ([0], vectors[0], {}),
        ([1], vectors[1], {"hook": "pre_attn"}),
        ([1], vectors[2], {"op": "ablate"}),
    )
    rows = CaptureReader.from_bytes(api.http.get(f"/v1/captures/{job_id}/safetensors").content)
    assert [cosines is None for cosines in norms(api, job_id, module="two")["cosines"]] == [
        False,
        False,
        True,
        True,
    ]
    every = norms(api, job_id, module="two", module_layer=0)["cosines"]
    own = norms(api, job_id, module="two")["cosines"]
    for layer, column, found in ((3, 0, every[3]), (1, 2, own[1])):
        # of entries at one layer, that at the captured hook
        row = rows.array(layer, "post_block")[0]
        assert found[0] == pytest.approx(row[column] / np.linalg.norm(row), rel=1e-6)
    assert norms(api, job_id, module="two", hook="pre_attn")["cosines"][0][0] == pytest.approx(
        rows.array(1, "pre_attn")[0][1] / np.linalg.norm(rows.array(1, "pre_attn")[0]), rel=1e-6
    )


def test_a_wrong_parameter_of_norms_is_named(api: Api, narrow: Hand) -> None:
    job_id = captured(api, narrow, prompts=1)
    module(api, "one", ([1], np.ones(HIDDEN, np.float32), {}))
    for parameters, status, field in BAD:
        problem = norms(api, job_id, status, **parameters)
        assert problem["field"] == field, problem


#: Parameters → the status, and the one that is at fault.
BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"request": 7}, 404, "request"),
    ({"request": -1}, 400, "request"),
    ({"hook": "mlp_in"}, 400, "hook"),
    ({"layers": "9"}, 400, "layers"),
    ({"layers": "x"}, 400, "layers"),
    ({"tag": "no"}, 404, "tag"),
    ({"module": "nothing"}, 404, "module"),
    ({"module": "a b"}, 400, "module"),
    ({"module_layer": 1}, 400, "module_layer"),
    ({"module": "one", "module_layer": 2}, 400, "module_layer"),
    ({"start": -1}, 400, "start"),
    ({"count": 0}, 400, "count"),
    ({"count": MAX_NORM_ROWS + 1}, 400, "count"),
]


@pytest.mark.parametrize(
    ("claimed", "field"),
    [({"positions": MAX_NORM_VALUES}, "count"), ({"bytes": MAX_NORM_BYTES + 1}, "request")],
)
def test_norms_of_too_much_are_refused_before_it_is_read(
    api: Api, hand: Hand, claimed: dict[str, int], field: str
) -> None:
    """The receipt says how much there is; a file of that size is not."""
    claim = hand.claim(api.submit(capture={"layers": "all", "tag": "mine"}))
    hand.store(claim)
    file = msgspec.structs.replace(
        hand.capture(claim), sites={"post_block": list(range(40))}, **claimed
    )
    hand.receipt(claim, files=[file])
    assert norms(api, claim.job.id, 400, count=MAX_NORM_ROWS)["field"] == field


def test_a_vector_of_another_width_is_refused(api: Api, narrow: Hand) -> None:
    job_id = captured(api, narrow, prompts=1)
    narrow.serve(hidden_size=2 * HIDDEN)
    module(api, "wide", ([1], np.ones(2 * HIDDEN, np.float32), {}))
    problem = norms(api, job_id, 400, module="wide")
    assert problem["field"] == "module"
    assert f"{2 * HIDDEN} elements" in problem["detail"]


def test_norms_wait_for_the_capture_and_end_with_it(api: Api, narrow: Hand) -> None:
    pending = api.submit(capture={"layers": "all"})
    assert norms(api, pending, 409)["type"] == "urn:midstream:conflict"
    assert norms(api, api.submit(), 404)["type"] == "urn:midstream:not_found"
    job_id = captured(api, narrow)
    assert api.http.delete(f"/v1/captures/{job_id}").status_code == 204
    assert norms(api, job_id, 410)["type"] == "urn:midstream:gone"


def test_a_module_that_is_deleted_while_it_is_read_is_a_conflict(api: Api, narrow: Hand) -> None:
    """The route has read its entries, and its vectors are gone: what a deletion between the two
    leaves.
    """
    job_id = captured(api, narrow, prompts=1)
    module(api, "brief", ([1], np.ones(HIDDEN, np.float32), {}))

    async def unpin() -> None:
        for key in await narrow.ledger.redis.keys("ms:pinned:*"):
            await narrow.ledger.redis.delete(key)

    narrow.do(unpin())
    for path, field in (
        (f"/v1/captures/{job_id}/norms?module=brief", "module"),
        ("/v1/artifacts/modules/brief/file", "name"),
    ):
        answer = api.http.get(path)
        assert answer.status_code == 409, answer.text
        assert answer.json()["field"] == field, answer.text
        assert answer.json()["hint"] == "ask again", answer.text
    assert api.http.get("/v1/artifacts/modules/brief").status_code == 200


def test_a_tenant_that_looks_too_often_does_not_hold_up_the_others(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    """A segment that is locked takes the place of a slow disk.

    The limit is of calls that are under way.
    """
    hand.layout = "segment"
    ada = Caller(api, hand, "vision")
    bob = Caller(api, hand, "speech")
    jobs = {
        each: each.submit(capture={"layers": "all", "positions": "all_prompt"})
        for each in (ada, bob)
    }
    for job_id in jobs.values():
        hand.finish(job_id)
    urls = {each: f"/v1/captures/{job_id}/norms" for each, job_id in jobs.items()}
    (file,) = ada.http.get(f"/v1/captures/{jobs[ada]}").json()["files"]
    with (api.settings.capture_root / file["path"]).open("rb") as segment:
        fcntl.flock(segment, fcntl.LOCK_EX)
        looks = [pool.submit(ada.http.get, urls[ada]) for _ in range(MEASURED_OF_TENANT + 1)]
        (first,) = wait(looks, timeout=60, return_when=FIRST_COMPLETED).done
        other = pool.submit(bob.http.get, urls[bob])  # waits for its turn
    assert first.result().status_code == 429
    assert first.result().headers["retry-after"] == "1"
    assert "looks at captured rows of tenant vision" in first.result().json()["detail"]
    assert other.result().status_code == 200
    assert [look.result().status_code for look in looks].count(429) == 1
    assert ada.http.get(urls[ada]).status_code == 200


# field case 39
def test_norms_of_damaged_rows_are_an_error(api: Api, narrow: Hand) -> None:
    job_id = captured(api, narrow, prompts=1)
    file = api.http.get(f"/v1/captures/{job_id}").json()["files"][0]
    path = api.settings.capture_root / file["path"]
    raw = bytearray(path.read_bytes())
    raw[8 + int.from_bytes(raw[:8], "little")] ^= 1
    path.write_bytes(raw)
    assert norms(api, job_id, 500)["type"] == "urn:midstream:capture_damaged"
    path.unlink()
    assert norms(api, job_id, 410)["type"] == "urn:midstream:gone"


def test_norms_are_for_their_tenant_and_its_modules(api: Api, hand: Hand) -> None:
    ada = Caller(api, hand, "vision")
    bob = Caller(api, hand, "speech")
    job_id = ada.submit(capture={"layers": "all", "positions": "all_prompt"})
    hand.finish(job_id)
    module(bob, "secret", ([1], np.ones(8, np.float32), {}))
    url = f"/v1/captures/{job_id}/norms"
    assert ada.http.get(url).status_code == 200
    assert bob.http.get(url).status_code == 404
    refused = ada.http.get(url, params={"module": "secret"})
    assert refused.status_code == 404
    assert refused.json()["field"] == "module"
    assert refused.json()["hint"] == "no module exists yet"
