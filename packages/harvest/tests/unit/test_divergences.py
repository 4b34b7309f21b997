"""Is the KL divergence of two harvests that of their models' predictions, in the order of keys?"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from refusal_kit import refuses
from transformers import AutoModelForCausalLM

from midstream.schemas.base.errors import MidstreamError
from midstream.workers.engine.model_identity import content_of, digests_in
from midstream.workers.engine.proof.reference import Checkpoint
from midstream_harvest.files.shards import RowOrigins
from midstream_harvest.records.work import Survey
from midstream_harvest.surveys.survey import divergences, heads

DOCUMENTS = 5
TOKENS = 6
KEYS = RowOrigins(
    np.repeat(np.arange(DOCUMENTS), TOKENS),
    np.tile(np.arange(TOKENS), DOCUMENTS),
    np.random.default_rng(0).integers(2, tiny.VOCABULARY, DOCUMENTS * TOKENS),
)
SURVEY = Survey(uris=[], top=2, context=2, against="hrv_y")


def shard(keys: RowOrigins, rows: np.ndarray) -> Any:
    """With rows of the last layer alone."""
    kept = {("post_block", tiny.LAYERS - 1): rows}
    return SimpleNamespace(
        keys=lambda: keys, rows=lambda hook, layer: kept[hook, layer], close=lambda: None
    )


class Harvest:
    """Two shards, each in another order than its keys."""

    def __init__(self, checkpoint: list[Any], rows: np.ndarray, keys: RowOrigins = KEYS) -> None:
        half = len(rows) // 2
        orders = np.random.default_rng(2).permutation(half), np.arange(half, len(rows))[::-1]
        self.shards = [
            shard(RowOrigins(*[part[order] for part in keys]), rows[order]) for order in orders
        ]
        self.manifest = SimpleNamespace(id="hrv_x", model="tiny", checkpoint=checkpoint)
        self._rows = len(rows)

    def __len__(self) -> int:
        return self._rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def recorded(path: Path, architecture: str, data: Path, **changed: Any) -> list[Any]:
    """What a worker writes into the manifests of its harvests."""
    content = content_of(digests_in(str(data)), str(path), None)
    source = Checkpoint(path=str(path), architecture=architecture, limit_gib=1, content=content)
    return [*source._replace(**changed)]


def computed(folder: Path, name: str, architecture: str) -> tuple[Harvest, torch.Tensor]:
    """A harvest of a tiny model's last layer, and its log-probabilities."""
    path = tiny.checkpoint(name, folder / name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = []
    layers = model.transformer.h if name == "gpt2" else model.model.layers

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        rows.append(output[0] if isinstance(output, tuple) else output)

    layers[-1].register_forward_hook(keep)
    with torch.inference_mode():
        ids = torch.from_numpy(KEYS.token_ids).view(DOCUMENTS, TOKENS)
        logs = model(input_ids=ids).logits.double().log_softmax(-1).flatten(0, 1)
    return Harvest(recorded(path, architecture, folder), rows[0].flatten(0, 1).numpy().copy()), logs


def test_kl_is_that_of_both_models_own_predictions(folder: Path) -> None:
    """Also of models of two architectures."""
    pair, logs = zip(
        computed(folder, "llama", "LlamaForCausalLM"),
        computed(folder, "gpt2", "GPT2LMHeadModel"),
        strict=True,
    )
    models = heads(pair, str(folder))  # type: ignore[arg-type]
    found, kl = divergences(models, pair, SURVEY)  # type: ignore[arg-type]
    wanted = (logs[0].exp() * (logs[0] - logs[1])).sum(1).numpy()
    np.testing.assert_allclose(kl, wanted, rtol=1e-4)
    assert wanted.min() > 0.1
    strongest = wanted.reshape(DOCUMENTS, TOKENS)
    best = np.argsort(-strongest.max(1))[:2]
    assert found.arrays["documents"][0].tolist() == best.tolist()
    assert found.arrays["positions"][0].tolist() == strongest[best].argmax(1).tolist()
    assert not divergences([models[0]] * 2, [pair[0]] * 2, SURVEY)[1].any()  # type: ignore[list-item]


def test_rows_that_are_not_finite_count_nothing_and_other_tokens_are_refused(folder: Path) -> None:
    harvest, _ = computed(folder, "llama", "LlamaForCausalLM")
    rows = np.random.default_rng(1).standard_normal((len(harvest), tiny.HIDDEN)).astype(np.float32)
    rows[7] = np.nan
    checkpoint = harvest.manifest.checkpoint
    pair: list[Any] = [harvest, Harvest(checkpoint, rows)]
    models = heads(pair, str(folder))
    assert models[0] is models[1]
    assert np.flatnonzero(divergences(models, pair, SURVEY)[1] == 0).tolist() == [7]
    changed = RowOrigins(KEYS.documents, KEYS.positions, np.append(KEYS.token_ids[:-1], 0))
    fewer = RowOrigins(*[part[:-TOKENS] for part in KEYS])
    for other in (Harvest(checkpoint, rows, changed), Harvest(checkpoint, rows[:-TOKENS], fewer)):
        for sides in ([harvest, other], [other, harvest]):
            with pytest.raises(MidstreamError, match="hrv_y has rows of other tokens"):
                divergences(models, sides, SURVEY)  # type: ignore[arg-type]


def test_a_checkpoint_that_is_not_the_one_that_computed_the_rows_is_refused(folder: Path) -> None:
    rows = np.zeros((DOCUMENTS * TOKENS, tiny.HIDDEN), np.float32)
    first = recorded(tiny.checkpoint("llama", folder / "llama"), "LlamaForCausalLM", folder)
    moved = tiny.checkpoint("llama", folder / "moved")
    missing = recorded(moved, "LlamaForCausalLM", folder)
    moved.rename(folder / "elsewhere")
    edited = tiny.checkpoint("llama", folder / "edited")
    changed = recorded(edited, "LlamaForCausalLM", folder)
    (edited / "generation_config.json").write_text("{}")
    smaller = tiny._llama_like("Llama", vocab_size=256).make(folder / "smaller")
    for checkpoint, says in (
        (missing, "the checkpoint cannot be read"),
        (changed, "the files in .*edited have changed since"),
        (recorded(smaller, "LlamaForCausalLM", folder), "have 512 and 256 tokens"),
        (recorded(edited, "LlamaForCausalLM", folder, refused="it is quantised"), "quantised"),
        (None, "this engine has no checkpoint"),
    ):
        sides: list[Any] = [Harvest(first, rows), Harvest(checkpoint, rows)]  # type: ignore[arg-type]
        with refuses(match=says, kind="invalid_request", field="against"):
            heads(sides, str(folder))
