"""Probes in a rank's whole data plane: scores of an ended request, and what is left of rows that
were scored.
"""

from pathlib import Path

import numpy as np
import pytest
from plane_kit import Rig
from rank_kit import HIDDEN, Request

from midstream.schemas.artifacts.probes import Action, ProbeContent, StoredProbe
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.requests.specs import probe_captures

WEIGHT = np.random.default_rng(0).normal(size=(1, HIDDEN)).astype(np.float32)


def probed(rig: Rig, action: Action, number: int = 1) -> Request:
    """A request of 6 prompt tokens and 2 generated ones, with a probe at layer 1."""
    tensors = [from_numpy(WEIGHT), from_numpy(np.full(1, 0.5, dtype=np.float32))]
    rig.plane.rank_state.put_vectors({content_hash(tensor): tensor for tensor in tensors})
    content = ProbeContent(
        hook="post_block",
        layer=1,
        tensors=[content_hash(tensor) for tensor in tensors],
        labels=["x"],
        thresholds=[1e9],
    )
    probe = StoredProbe(
        name="p", digest=content.digest, content=content, action=action, tokens=True
    )
    request = Request(number, 6, 8, probe_captures([probe]))
    request.tracked.spec.probes.append(probe)
    return request


@pytest.mark.parametrize("action", ["flag", "stop"])
def test_an_ended_request_has_the_scores_of_all_its_tokens(tmp_path: Path, action: Action) -> None:
    rig = Rig(tmp_path)
    request, other = probed(rig, action), probed(rig, action, number=2)
    rig.step((request, 0, 6), (other, 0, 6), new=[request, other])
    rows = [rig.left("post_block", 1)[:6]]
    rig.step((request, 6, 1), (other, 6, 1))
    rows.append(rig.left("post_block", 1)[:1])
    tracked = [
        each
        for each in rig.plane._tracked.values()
        for recording in each.recordings.values()
        if recording.pieces()
    ]
    assert not tracked, "rows that are scored or wait for it are held by nothing else"
    rig.step((other, 7, 1), finished=[request])
    receipt = next(each for each in rig.receipts() if each.job == "j1")
    assert (receipt.status, receipt.message) == ("ok", "")
    found = np.frombuffer(receipt.scores[0].tokens, dtype="<f4")
    np.testing.assert_allclose(found, np.concatenate(rows) @ WEIGHT[0] + 0.5, rtol=1e-5)


def test_rows_of_requests_that_are_forgotten_are_let_go(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    request = probed(rig, "flag")
    rig.step((request, 0, 6), new=[request])
    assert rig.plane._probes._kept
    rig.plane.restart()
    assert not rig.plane._probes._kept
