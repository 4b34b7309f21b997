"""Are the hook points of a layer found by what it does, whatever its parts are called, and refused
where there are none?
"""

import pytest
import torch
from torch import nn

from midstream.schemas.prompts.selectors import HOOKS
from midstream.workers.runner.hooks.architectures import Adapter, Tap, Variant
from midstream.workers.runner.hooks.layer_discovery import LayerShape, NoStreamError, probe

HIDDEN = 64


class Part(nn.Module):
    """Computes something: the probe never runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        raise AssertionError("the probe ran it")


class InPlace(Part):
    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:  # type: ignore[override]
        raise AssertionError("the probe ran it")


class Norm(nn.Module):
    """As vLLM's: with a residual it adds it, and returns both."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> object:
        stream = x if residual is None else x + residual
        normed = stream / stream.pow(2).mean(-1, keepdim=True).sqrt()
        return normed if residual is None else (normed, stream)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Norm()
        self.two = Norm()
        self.three = Norm()
        self.four = Norm()
        self.mixer = Part()
        self.other = Part()


class Fused(Layer):
    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.one(hidden_states)
        else:
            hidden_states, residual = self.one(hidden_states, residual)
        hidden_states, residual = self.two(self.mixer(hidden_states=hidden_states), residual)
        return self.other(hidden_states), residual


class Sandwich(Layer):
    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = self.one(hidden_states, residual)
        hidden_states, residual = self.three(self.two(self.mixer(hidden_states)), residual)
        return self.four(self.other(hidden_states)), residual


class Scaled(Layer):
    """Granite's: `0.22` before each addition."""

    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + 0.22 * self.mixer(self.one(hidden_states))
        return hidden_states + 0.22 * self.other(self.two(hidden_states))


class Times(Layer):
    """Gemma 4's: all of it times a number of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("layer_scalar", torch.tensor([0.37]))

    def forward(self, positions, hidden_states, residual):
        hidden_states = hidden_states + self.two(self.mixer(self.one(hidden_states)))
        hidden_states = hidden_states + self.four(self.other(self.three(hidden_states)))
        return hidden_states * self.layer_scalar, None


class Parallel(Layer):
    def forward(self, position_ids, hidden_states):
        normed = self.one(hidden_states)
        return hidden_states + self.mixer(normed) + self.other(normed)


class PostNorm(Layer):
    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.one(self.mixer(hidden_states))
        return hidden_states + self.two(self.other(hidden_states))


class Written(Layer):
    """A mixer that writes to a tensor which it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = InPlace()

    def forward(self, hidden_states, positions):
        output = torch.empty_like(hidden_states)
        self.mixer(self.one(hidden_states), output)
        hidden_states = hidden_states + output
        return hidden_states + self.other(self.two(hidden_states))


class Tuples(Layer):
    """transformers': attention returns its weights too."""

    def forward(self, hidden_states, attention_mask=None):
        attended, _ = self.mixer(hidden_states=self.one(hidden_states))
        hidden_states = hidden_states + attended
        return hidden_states + self.other(self.two(hidden_states))


class Several(Layer):
    """Two mixers beside each other: their sum is no part's output."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Part()

    def forward(self, positions, hidden_states):
        normed = self.one(hidden_states)
        hidden_states = hidden_states + self.mixer(normed) + 0.5 * self.state(normed)
        return hidden_states + self.other(self.two(hidden_states))


class Normed(Layer):
    """BERT's: the sums are normalised before anything reads them."""

    def forward(self, hidden_states):
        hidden_states = self.one(hidden_states + self.mixer(hidden_states))
        return self.two(hidden_states + self.other(hidden_states))


class Copied(Layer):
    """What the norm reads is a copy: an edit in place would reach the MLP, and not the stream."""

    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.mixer(self.one(hidden_states))
        return hidden_states + self.other(self.two(hidden_states.clone()))


def shape(layer: nn.Module, dtype: torch.dtype = torch.float32) -> LayerShape:
    return probe(layer.to(dtype), HIDDEN, dtype=dtype, device=torch.device("cpu"), known=(0.22,))


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize(("layer", "norm"), [(Fused, "two"), (Sandwich, "three")])
def test_a_fused_norm_reads_the_stream_as_a_pair(layer, norm, dtype) -> None:
    assert shape(layer(), dtype).taps == {
        "pre_attn": Tap("", "input", "pair"),
        "attn_out": Tap(norm, "input"),
        "post_attn": Tap(norm, "input", "pair"),
        "mlp_in": Tap(norm, "output"),
        "mlp_out": Tap("", "output"),
        "post_block": Tap("", "output", "pair"),
    }


@DTYPES
@pytest.mark.parametrize(
    ("layer", "attended"),
    [(Scaled, "mixer"), (Times, "two"), (Written, "mixer"), (Tuples, "mixer")],
)
def test_one_tensor_is_the_stream(layer, attended, dtype) -> None:
    found = shape(layer(), dtype)
    assert found.taps["attn_out"] == Tap(attended, "output")
    assert found.taps["post_attn"].kind == found.taps["post_block"].kind == "single"
    assert found.absent == {}


@DTYPES
def test_multipliers_are_part_of_what_is_found(dtype) -> None:
    assert shape(Scaled(), dtype).laws == {
        "post_attn": {"pre_attn": 1.0, "attn_out": 0.22},
        "post_block": {"post_attn": 1.0, "mlp_out": 0.22},
    }
    stated = float(torch.tensor(0.37, dtype=dtype))
    assert shape(Times(), dtype).laws["post_block"] == {"post_attn": stated, "mlp_out": stated}


@pytest.mark.parametrize(
    ("layer", "hooks"),
    [(Scaled, ["attn_out", "mlp_out"]), (Times, ["mlp_out", "post_attn"]), (Parallel, [])],
)
def test_an_adapter_names_the_hooks_that_are_multiplied(layer, hooks) -> None:
    found = shape(layer())
    plain = Variant("layers", found.taps)
    measured = Variant("layers", found.taps, measured=found.laws)
    made = Adapter("Tiny", plain, HIDDEN, 2, kinds={1: measured})
    assert made.multiplied == hooks


def test_a_parallel_block_has_no_post_attn() -> None:
    found = shape(Parallel())
    assert found.taps.keys() == set(HOOKS) - {"post_attn"}
    assert found.taps["mlp_in"] == Tap("other", "input")
    assert found.laws == Variant("layers", found.taps).laws


def test_an_mlp_that_reads_the_stream_has_no_mlp_in() -> None:
    found = shape(PostNorm())
    assert found.taps["attn_out"] == Tap("one", "output")
    assert found.taps["post_attn"] == Tap("other", "input")
    assert "which is post_attn" in found.absent["mlp_in"]


def test_a_branch_of_several_parts_is_absent_with_their_names() -> None:
    found = shape(Several())
    assert found.absent == {"attn_out": "it is the sum of several parts (mixer, state)"}
    assert "post_attn" not in found.laws


@pytest.mark.parametrize(
    ("layer", "why"),
    [(Normed, "is not its input"), (Copied, "an edit at post_attn .* does not reach")],
)
def test_a_layer_without_a_stream_that_can_be_edited_is_refused(layer, why) -> None:
    with pytest.raises(NoStreamError, match=why):
        shape(layer())


def test_the_layer_is_as_it_was_after_the_probe() -> None:
    layer = Fused()
    shape(layer)
    assert not [name for name, part in layer.named_modules() if "forward" in vars(part)]
