"""Parts of readings: how they are joined, and what a rank refuses."""

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from sae_rows import D_IN, D_SAE, FORMS, ROOT
from safetensors.numpy import save_file

from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.artifacts.tuned_lenses import StoredTuned
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.readings.features import FeaturesPart, StoredFeatures
from midstream.schemas.readings.lens import LensPart, StoredLens
from midstream.schemas.readings.readings import part_decoder
from midstream.schemas.readings.stored import READER
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.storage.formats.lens_files import FILE, check_on
from midstream.storage.formats.sae_files import (
    SaeError,
    decoder_row,
    feature_of,
    reading,
    tensors_of,
)
from midstream.workers.runner.files.finished_rows import FinishedCapture, ReadingError
from midstream.workers.runner.hooks.output_head import VocabularyShard
from midstream.workers.runner.readings import features, sae
from midstream.workers.runner.readings.logit_lens import LensReader
from midstream.workers.runner.readings.readings import ReadingConsumer, own_stream
from midstream.workers.runner.readings.sae import Autoencoder, load
from midstream.workers.runner.readings.tuned_lenses import TunedMaps

LAYERS = [1, 3]
POSITIONS = [0, 4, 5]
HIDDEN = 6
VOCABULARY = 11
NAMED = [2, 9]
ROWS = np.random.default_rng(0).normal(size=(2, 3, HIDDEN)).astype(np.float32)
HEAD = torch.from_numpy(
    np.random.default_rng(1).normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)
)


class PlainHead:
    """Tokens `start … stop` of a head without a norm, or the tokens `only`."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, number: int, count: int, only: list[int] | None = None) -> None:
        step = -(-VOCABULARY // count)
        self.shard = VocabularyShard(
            number * step, min((number + 1) * step, VOCABULARY), number, count
        )
        self._weight = HEAD[self.shard.start : self.shard.stop] if only is None else HEAD[only]

    def norm(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self._weight.T


def capture(reading: StoredLens | None = None, **more: object) -> FinishedCapture:
    stored = StoredCapture(
        sites={"post_block": LAYERS},
        positions=POSITIONS,
        tag="",
        consumers=[READER],
        reading=reading or StoredLens(top_k=4, tokens=NAMED),
    )
    fields: dict[str, object] = {
        "spec": RankSpec(
            version="v", job="j", request=0, attempt=1, prompt_tokens=6, captures=[stored]
        ),
        "capture": stored,
        "sites": {"post_block": LAYERS},
        "hidden_size": HIDDEN,
        "dtype": "float32",
        "positions": POSITIONS,
        "token_ids": [7, 8, 9],
        "worker": "w",
        "rank": 0,
        "pp": 0,
        "stages": 1,
        "rows": lambda _, layer: [memoryview(ROWS[LAYERS.index(layer)].tobytes())],
    }
    return FinishedCapture(**(fields | more))  # type: ignore[arg-type]


def parts(count: int) -> list[LensPart]:
    made = []
    for number in range(count):
        lens = LensReader(PlainHead(number, count))  # type: ignore[arg-type]
        made.append(lens(capture(prepared=PlainHead(0, 1, NAMED) if count > 1 else None), 0))
    return made


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_of_a_vocabulary_join_to_the_whole(count: int) -> None:
    found = LensPart.joined(0, parts(count)[::-1])
    wanted = (torch.from_numpy(ROWS) @ HEAD.T).log_softmax(dim=-1).numpy()
    assert found is not None
    tokens = np.argsort(-wanted, axis=-1)[..., :4]
    np.testing.assert_array_equal(found.top_tokens, tokens)
    np.testing.assert_allclose(
        found.top_logprobs, np.take_along_axis(wanted, tokens, -1), atol=1e-6
    )
    np.testing.assert_allclose(found.named_logprobs, wanted[..., NAMED], atol=1e-6)
    np.testing.assert_array_equal(
        found.named_ranks,
        [[[(row > row[t]).sum() for t in NAMED] for row in layer] for layer in wanted],
    )
    assert found.layers == LAYERS
    assert found.positions == POSITIONS
    assert found.token_ids == [7, 8, 9]
    assert found.named_tokens == NAMED


def test_rows_are_read_in_chunks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "midstream.workers.runner.readings.logit_lens.CHUNK_BYTES", 2 * 4 * VOCABULARY
    )
    sizes: list[int] = []
    head = PlainHead(0, 1)
    monkeypatch.setattr(head, "norm", lambda rows: sizes.append(len(rows)) or rows)
    assert to_msgpack(LensReader(head)(capture(), 0)) == to_msgpack(parts(1)[0])  # type: ignore[arg-type]
    assert max(sizes) == 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dropped": (4,)}, "rows of 1 positions were dropped under overload"),
        (
            {"unsound": ("post_block", 1, 4)},
            "the row at post_block of layer 1, position 4, is not finite",
        ),
    ],
)
def test_a_reading_of_missing_or_broken_rows_fails(changed: dict[str, object], words: str) -> None:
    consumer = ReadingConsumer({StoredLens: LensReader(PlainHead(0, 1))}, 1 << 20)  # type: ignore[arg-type]
    fine, broken = consumer.consume([capture(), capture(**changed)])
    assert fine.error == ""
    assert part_decoder.decode(fine.rows).layers == LAYERS
    assert broken.error == words
    assert broken.rows == b""


def test_a_reading_beyond_the_limit_or_without_reader_fails() -> None:
    reader = LensReader(PlainHead(0, 1))  # type: ignore[arg-type]
    assert (
        "exceed the response limit of 64"
        in ReadingConsumer({StoredLens: reader}, 64).consume([capture()])[0].error
    )
    assert "no reader for StoredLens" in ReadingConsumer({}, 1 << 20).consume([capture()])[0].error


def test_an_error_in_a_reader_is_its_own_outcome() -> None:
    def broken(_: FinishedCapture, __: int) -> LensPart:
        raise ValueError("what it says")

    assert (
        ReadingConsumer({StoredLens: broken}, 1 << 20).consume([capture()])[0].error
        == "ValueError: what it says"
    )


# --- Tuned lenses
# --------------------------------------------------------------------------------------------------


def registered(root: Path, *, residual: bool = False) -> tuple[StoredTuned, dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    maps = {
        f"{layer}.weight": rng.normal(size=(HIDDEN, HIDDEN)).astype(np.float32) for layer in LAYERS
    }
    maps |= {f"{layer}.bias": rng.normal(size=HIDDEN).astype(np.float32) for layer in LAYERS}
    (root / "mine").mkdir()
    save_file(maps, root / "mine" / FILE)
    digest, layers, _ = check_on(root / "mine", 4, HIDDEN)
    assert layers == LAYERS
    return StoredTuned(name="mine", digest=digest, path="mine", residual=residual), maps


@pytest.mark.parametrize("residual", [False, True])
def test_a_tuned_lens_is_the_formula_before_the_head(tmp_path: Path, residual: bool) -> None:
    tuned, maps = registered(tmp_path, residual=residual)
    lens = LensReader(PlainHead(0, 1), tuned=TunedMaps(str(tmp_path)))  # type: ignore[arg-type]
    found = LensPart.joined(0, [lens(capture(StoredLens(top_k=VOCABULARY, tuned=tuned)), 0)])
    assert found is not None
    for place, layer in enumerate(LAYERS):
        rows = (
            ROWS[place] @ maps[f"{layer}.weight"].T
            + maps[f"{layer}.bias"]
            + (ROWS[place] if residual else 0)
        )
        wanted = torch.from_numpy(rows @ HEAD.numpy().T).log_softmax(dim=-1).numpy()
        np.testing.assert_allclose(found.top_logprobs[place], -np.sort(-wanted, axis=-1), atol=1e-5)


def test_a_tuned_lens_whose_file_has_changed_fails_the_reading(tmp_path: Path) -> None:
    tuned, maps = registered(tmp_path)
    consumer = ReadingConsumer(
        {StoredLens: LensReader(PlainHead(0, 1), tuned=TunedMaps(str(tmp_path)))}, 1 << 20
    )  # type: ignore[arg-type]
    asked = capture(StoredLens(top_k=2, tuned=tuned))
    assert [consumer.consume([asked])[0].error for _ in range(2)] == ["", ""]
    save_file({**maps, "1.bias": maps["1.bias"] + 1}, tmp_path / "mine" / FILE)
    assert "has changed since it was registered" in consumer.consume([asked])[0].error
    (tmp_path / "mine" / FILE).unlink()
    assert "'mine' has no lens.safetensors" in consumer.consume([asked])[0].error


def test_a_writer_thread_reads_on_one_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream costs a workspace of cuBLAS."""
    made: list[object] = []

    def stream(device: torch.device) -> object:
        made.append(object())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    used: list[list[object]] = []

    def read() -> None:
        streams = []
        for _ in range(3):
            with own_stream(torch.device("cuda")) as current:
                streams.append(current)
        used.append(streams)

    for thread in [threading.Thread(target=read) for _ in range(2)]:
        thread.start()
        thread.join()
    assert used == [[made[0]] * 3, [made[1]] * 3]


@pytest.mark.parametrize(("spare", "on_device"), [(0, True), (-1, False)])
def test_autoencoders_encode_on_the_device_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, spare: int, on_device: bool
) -> None:
    """And on a stream of the writer's own."""
    folder = ROOT / "standard"
    log = []
    with reading(folder) as (content, _):
        digest = content.digest
    free = load(folder, digest).bytes + features._ROOM_BYTES + spare

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            log.append(name)
            return function(*args)

        return call

    synchronize = noting("loaded", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=synchronize)
    )
    monkeypatch.setattr(Autoencoder, "to", noting("to the device", lambda sae, _: sae))
    monkeypatch.setattr(Autoencoder, "top", noting("encode", Autoencoder.top))
    monkeypatch.setattr(features, "own_stream", noting("own stream", nullcontext))
    reader = features.FeatureReader([("post_block", 1)], torch.device("cuda"))
    reader.put(digest, "post_block", 1, str(folder))
    named = StoredSae(name="s", digest=digest, path="s", hook="post_block", layer=1, bytes=1)
    asked = StoredFeatures(sae=named, top_k=2)
    sae = reader.prepare(asked)
    assert sae is not None
    width = sae.form.d_in
    rows = np.ones((len(POSITIONS), width), dtype=np.float32)
    reader(
        capture(
            capture=msgspec.structs.replace(capture().capture, reading=asked),
            sites={"post_block": [1]},
            hidden_size=width,
            prepared=sae,
            rows=lambda *_: [memoryview(rows.tobytes())],
        ),
        0,
    )
    loading = ["to the device", "loaded"] if on_device else []
    assert log == [*loading, "own stream", "encode"]


#: What a part has apart from its positions, at most.
HEADER = 300
#: Numbers as large as MessagePack's longest for 32 bits.
FIRST = 1 << 20


def of_words(top_k: int) -> StoredFeatures:
    with reading(ROOT / "jumprelu") as (content, _):
        named = StoredSae("words", content.digest, "jumprelu", "post_block", 1, 1)
    return StoredFeatures(sae=named, top_k=top_k)


def encoded(wanted: StoredFeatures, rows: np.ndarray, layer: int = 1) -> FeaturesPart:
    """By the reader of a rank that holds this layer."""
    reader = features.FeatureReader([("post_block", layer)])
    reader.put(wanted.sae.digest, "post_block", 1, str(ROOT / "jumprelu"))
    places = [FIRST + place for place in range(len(rows))]
    fields = {"sites": {"post_block": [1]}, "positions": places}
    one = msgspec.structs.replace(capture().capture, reading=wanted, **fields)
    more = {"hidden_size": D_IN, "token_ids": places, "prepared": reader.prepare(wanted)}
    raw = [memoryview(rows.tobytes())]
    return reader(capture(capture=one, rows=lambda *_: raw, **fields, **more), 0)


@pytest.mark.parametrize("top_k", [1, 10, D_SAE])
def test_a_part_has_the_bytes_that_admission_counts(top_k: int) -> None:
    wanted = of_words(top_k)
    rows = np.random.default_rng(2).standard_normal((500, D_IN)).astype(np.float32)
    part = encoded(wanted, rows)
    counted = wanted.size(len(rows), 1)
    assert counted * 0.98 < len(to_msgpack(part)) <= counted + HEADER
    joined = FeaturesPart.joined(3, [part])
    assert joined.sae == "words"
    assert joined.positions[0] == FIRST
    assert len(joined.features) == len(rows)
    wide = load(ROOT / "jumprelu", wanted.sae.digest).encode(torch.from_numpy(rows)).numpy()
    for row, found, values in zip(wide, joined.features, joined.activations, strict=True):
        assert len(found) == min(top_k, int((row > 0).sum()))
        np.testing.assert_allclose(row[found], values, atol=1e-6)


def test_an_autoencoder_of_another_stages_layer_is_not_loaded() -> None:
    with pytest.raises(ReadingError, match=r"'words' .* is not loaded"):
        encoded(of_words(3), np.zeros((1, D_IN), np.float32), layer=0)


# --- Sparse autoencoders give the numbers that sae-lens gives; `sae_rows.py` made both

NAMES = [*FORMS, "flat", "gemma_scope"]
#: Those whose features depend on their own weights alone.
RULED = ["standard", "bare", "jumprelu", "gated", "gemma_scope", "layer_norm", "constant_norm"]
#: Sums of 8 or 32 numbers of size 1, in another order.
TOLERANCE = {"atol": 2e-6, "rtol": 2e-6}


@pytest.fixture(scope="module")
def theirs() -> Mapping[str, np.ndarray]:
    with np.load(ROOT / "rows.npz") as arrays:
        return dict(arrays)


def loaded(name: str) -> Autoencoder:
    with reading(ROOT / name) as (content, _):
        return load(ROOT / name, content.digest)


@pytest.mark.parametrize("name", NAMES)
def test_activations_and_reconstructions_equal_those_of_sae_lens(
    name: str, theirs: Mapping[str, np.ndarray]
) -> None:
    autoencoder = loaded(name)
    rows = torch.tensor(theirs["rows"])
    activations = autoencoder.encode(rows)
    np.testing.assert_allclose(activations, theirs[f"{name}.activations"], **TOLERANCE)
    scaled = sae.NORMALISATIONS[autoencoder.form.normalize_activations](rows)
    np.testing.assert_allclose(
        autoencoder.decode(activations) * scaled.scale + scaled.shift,
        theirs[f"{name}.decoded"],
        **TOLERANCE,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_top_features_are_the_largest_activations_in_any_chunks(
    name: str, theirs: Mapping[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sae, "CHUNK_BYTES", 2 * 4 * 32)
    rows = theirs["rows"]
    wanted = theirs[f"{name}.activations"]
    k = 7
    found = loaded(name).top(torch.tensor(rows), k)
    assert found.indices.shape == found.activations.shape == (len(rows), k)
    assert found.active.tolist() == (wanted > 0).sum(1).tolist()
    for row, indices, values in zip(wanted, found.indices, found.activations, strict=True):
        active = min(k, int((row > 0).sum()))
        assert (indices[active:] == -1).all()
        assert (values[active:] == 0).all()
        np.testing.assert_allclose(values[:active], np.sort(row)[::-1][:active], **TOLERANCE)
        np.testing.assert_allclose(row[indices[:active]], values[:active], **TOLERANCE)
    errors = np.linalg.norm(rows - theirs[f"{name}.decoded"], axis=1) / np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(found.errors, errors, **TOLERANCE)


@pytest.mark.parametrize("name", RULED)
def test_a_feature_alone_has_the_activation_that_sae_lens_gives_it(
    name: str, theirs: Mapping[str, np.ndarray]
) -> None:
    with reading(ROOT / name) as (content, file):
        tensors = tensors_of(content.form, file)
        for number in range(content.form.d_sae):
            rule = feature_of(content.form, tensors, number)
            read = sae.NORMALISATIONS[content.form.normalize_activations](
                torch.tensor(theirs["rows"])
            ).rows
            over = read.double().numpy() @ rule.encoder + rule.bias
            np.testing.assert_allclose(
                np.where(over > rule.threshold, over, 0),
                theirs[f"{name}.activations"][:, number],
                **TOLERANCE,
            )
            assert (rule.decoder == tensors["W_dec"][number]).all()


@pytest.mark.parametrize("name", [*RULED, "topk", "rescaled", "flat"])
def test_a_decoder_row_is_what_one_more_unit_of_activation_adds(
    name: str, theirs: Mapping[str, np.ndarray]
) -> None:
    autoencoder = loaded(name)
    with reading(ROOT / name) as (content, file):
        row = decoder_row(content.form, tensors_of(content.form, file), 3)
    activations = torch.tensor(theirs[f"{name}.activations"][:1])
    more = activations.clone()
    more[0, 3] += 1
    np.testing.assert_allclose(
        row, (autoencoder.decode(more) - autoencoder.decode(activations))[0], **TOLERANCE
    )


@pytest.mark.parametrize("name", ["topk", "rescaled", "flat"])
def test_a_feature_that_is_no_rule_of_its_own_weights_is_refused(name: str) -> None:
    with (
        reading(ROOT / name) as (content, file),
        pytest.raises(SaeError, match="depends on all other features"),
    ):
        feature_of(content.form, tensors_of(content.form, file), 0)


def test_files_of_another_content_are_not_loaded() -> None:
    with pytest.raises(SaeError, match="have changed since it was registered"):
        load(ROOT / "standard", "0" * 64)
