"""Records what nnsight's column of the table of equivalents in docs/coming-from.md gives, for
packages/bridges/tests/long/test_equivalents.py.

    .cache/lens/bin/python tools/peers/nnsight_calls.py MODEL rows.safetensors
        # the environment of `make lens`; float32

Imports nothing of ours. The code of the column is below, as it stands there.
"""

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from nnsight import TransformersModel
from safetensors.torch import save_file
from tokenizers import Tokenizer

PROMPT = "The Eiffel Tower is located in the city of"
OTHER = "The Colosseum is located in the city of"
#: Layers whose row of the last token is patched, one after the other.
LOOP = (19, 23, 25)


def main(name: str, path: str) -> None:
    p = PROMPT
    tokenizer = Tokenizer.from_file(f"{name}/tokenizer.json")
    token, rome = (tokenizer.encode(text).ids[0] for text in (" Paris", " Rome"))
    model = TransformersModel(
        name,
        task="text-generation",
        dtype=torch.float32,
        attn_implementation="eager",
        dispatch=True,
    )
    layers = model.model.layers
    v = torch.randn(576, generator=torch.Generator().manual_seed(0))
    u = v / v.norm()
    kept = {"ids": torch.tensor([token, rome]), "v": v}

    with model.trace(p):
        kept["resid_pre"] = layers[12].input.save()
        kept["z"] = layers[12].self_attn.o_proj.input.save()
        kept["attn_out"] = layers[12].self_attn.output[0].save()
        kept["pattern"] = layers[12].self_attn.output[1].save()
        kept["mlp_out"] = layers[12].mlp.output.save()
        kept["resid_post"] = layers[12].output.save()
        kept["lens"] = model.lm_head(model.model.norm(layers[12].output)).save()
        kept["logits"] = model.lm_head.output.save()
        kept["logit"] = model.lm_head.output[0, -1, token].save()

    with model.trace(p):
        layers[12].output[:] += v
        kept["add"] = model.lm_head.output.save()
    with model.trace(p):
        layers[12].output[:] -= (layers[12].output @ u)[..., None] * u
        kept["ablate"] = model.lm_head.output.save()
    with model.trace(p):
        layers[12].self_attn.o_proj.input[..., 192:256] = 0
        kept["zero_head"] = model.lm_head.output.save()
    with model.trace(OTHER):
        row = layers[8].output.save()
    with model.trace(p):
        layers[8].output[:, 3] = row[:, 3]
        kept["patch"] = model.lm_head.output.save()

    clean = {}
    grid = {}
    with model.trace(p):
        for layer in LOOP:
            clean[layer] = layers[layer].input.save()
    for layer in LOOP:
        with model.trace(OTHER):
            layers[layer].input[:, -1] = clean[layer][:, -1]
            grid[layer] = model.lm_head.output[0, -1].save()
    kept["grid"] = torch.stack([grid[layer] for layer in LOOP])
    with model.trace(OTHER):
        kept["corrupt"] = model.lm_head.output.save()

    with model.generate(p, max_new_tokens=20, do_sample=False) as tracer:
        kept["generated"] = tracer.result.save()

    # Midstream has neither gradients nor weights: these only run.
    with model.trace(p):
        x = layers[12].output
        with model.lm_head.output[0, -1, token].backward():
            gradient = x.grad.save()
    assert gradient.abs().max() > 0
    assert model.lm_head.weight.shape[1] == len(v)
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in kept.items()}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
