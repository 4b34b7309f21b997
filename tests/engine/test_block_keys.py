"""Which epoch of the prefix cache is a request hashed for? vLLM's own request and hash functions,
our scheduler, no engine.
"""

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from midstream.broker.processes import orphans
from midstream.schemas.requests.specs import RankSpec
from midstream.workers.runner.base.packed_spec import pack
from midstream.workers.runner.base.row_index import RowIndex

BLOCK = 16


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # of an engine's processes; this one is the tests'
    monkeypatch.setattr(orphans, "die_with_parent", lambda: None)
    module = importlib.import_module("midstream.workers.runner.vllm.scheduler")
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(sha256)
    return module


def request(number: int, digest: str, salt: str | None = None) -> Any:
    """As vLLM makes one of what a client sends, four blocks long: in a thread of its own, ahead of
    the scheduler.
    """
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    spec = RankSpec(
        version="v",
        job="j",
        request=number,
        attempt=1,
        prompt_tokens=64,
        digest=digest,
        first_affected=BLOCK if digest else -1,
    )
    params = SamplingParams(max_tokens=1, extra_args=pack(spec))
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    return Request(str(number), list(range(64)), params, None, cache_salt=salt, block_hasher=hasher)


def scheduler_of(module: ModuleType) -> Any:
    class Scheduler:
        """As much of vLLM's as is asked; its blocks stay, as they do while requests run."""

        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}
            self._midstream_rows = RowIndex(0, 1, BLOCK)
            self._midstream_capturing = {}
            self._midstream_bases = {}
            self._midstream_arrived: dict[str, Any] = {}
            self._midstream_blocks = SimpleNamespace(clear=lambda: None)  # nothing is kept here
            self._midstream_probes = module.ProbeNews()
            pace = SimpleNamespace(learn=lambda *_: None)
            self._turns = SimpleNamespace(join=lambda _: None, pace=pace)
            self._last_ended = 0.0

        def add_request(self, request: Any) -> None:
            self.requests[request.request_id] = request

        def reset_prefix_cache(self) -> bool:
            return False

        def update_from_output(self, *_: Any) -> None:
            return

        def _update_request_with_output(self, *_: Any) -> None:
            raise AssertionError("no step has an output")

    return type("Ours", (module._Midstream, Scheduler), {"__init__": Scheduler.__init__})()


@pytest.mark.parametrize("when", ["it is on its way", "it waits", "before it comes"])
def test_blocks_from_before_a_cache_reset_serve_no_request(
    scheduler: ModuleType, when: str
) -> None:
    # field case 13
    ours = scheduler_of(scheduler)
    former = request(1, "d")
    ours.add_request(former)
    old = list(former.block_hashes)
    if when == "it is on its way":
        later = request(2, "d")
        ours.reset_prefix_cache()
        ours.add_request(later)
    elif when == "it waits":
        later = request(2, "d")
        ours.add_request(later)
        ours.reset_prefix_cache()
    else:
        ours.reset_prefix_cache()
        later = request(2, "d")
        ours.add_request(later)
    hashes = ours.requests["2"].block_hashes
    assert hashes[0] == old[0], "what lies below the first steered position stays shared"
    assert not set(hashes[1:]) & set(old[1:])
    assert len(hashes) == 4


@pytest.mark.parametrize("digest", ["", "d"])
def test_blocks_after_a_non_finite_row_are_not_shared(scheduler: ModuleType, digest: str) -> None:
    evicted: list[int] = []
    blocks = [SimpleNamespace(block_id=number) for number in range(4)]
    group = SimpleNamespace(block_size=BLOCK, req_to_blocks={"1": blocks})
    manager = SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=[group]), evict_blocks=evicted.extend
    )
    ours = scheduler_of(scheduler)
    mine = request(1, digest)
    other = request(2, digest)
    ours._midstream_quarantine = quarantine = scheduler.Quarantine(manager)
    ours.add_request(mine)
    nothing = SimpleNamespace(total_num_scheduled_tokens=0)
    ours.update_from_output(nothing, SimpleNamespace(midstream_non_finite=[("1", 2 * BLOCK + 3)]))
    assert sorted(evicted) == [2, 3]
    assert mine.block_hashes[:2] == other.block_hashes[:2]
    assert not set(mine.block_hashes[2:]) & set(other.block_hashes[2:])
    assert not quarantine.is_clean(mine)
    evicted.clear()
    quarantine.leaving("1")
    del group.req_to_blocks["1"]
    quarantine.isolate(None, "1", BLOCK)
    assert sorted(evicted) == [1, 2, 3], "also when it is gone"


def test_plain_requests_share_blocks_in_every_epoch(scheduler: ModuleType) -> None:
    ours = scheduler_of(scheduler)
    before = request(1, "")
    ours.reset_prefix_cache()
    after = request(2, "")
    ours.add_request(before)
    assert before.block_hashes == after.block_hashes


@pytest.mark.parametrize("digest", ["", "d"])
def test_prefix_blocks_are_not_shared_across_tenants_in_tenant_scope(
    scheduler: ModuleType, digest: str
) -> None:
    one, same, other, unsalted = (
        request(number, digest, salt) for number, salt in enumerate(("a", "a", "b", None))
    )
    assert one.block_hashes == same.block_hashes
    assert not set(one.block_hashes) & set(other.block_hashes)
    assert not set(one.block_hashes) & set(unsalted.block_hashes)
