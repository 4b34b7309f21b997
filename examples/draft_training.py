"""Makes the training files of a draft model: what the model itself answers, with hidden states,
tokens and a mask of the answer.

    midstream up &
    python examples/draft_training.py --out draft

Draft models such as EAGLE-3 learn from hidden states of the model that they draft for. The files
are those that vLLM's hidden-states connector writes: `hidden_states` `[tokens, layers, hidden]`,
`token_ids` and `loss_mask`, one file for each document.
"""

import argparse
from pathlib import Path

from safetensors import safe_open

import midstream

#: A low, a middle and a high one of the demo model, as EAGLE-3 takes them: vLLM's ids 2, 15 and 27,
#: since its id k is the output of layer k - 1.
LAYERS = [1, 14, 26]
QUESTIONS = ["What is the capital of {}?", "Name a river in {}.", "What do people eat in {}?"]
LANDS = ["France", "Italy", "Norway", "Japan", "Peru", "Kenya", "India", "Canada"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("draft"))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    asked = parser.parse_args()
    with midstream.Client() as client:
        model = client.models()[0]
        view = client.harvests.submit(
            model=model,
            source={"lines": [question.format(land) for question in QUESTIONS for land in LANDS]},
            layers=asked.layers,
            generate={"max_tokens": asked.tokens},
            positions={"skip_bos": False},
        )
        view = client.harvests.wait(view)
    paths = midstream.harvest.to_hidden_states(view.uri, asked.out)
    with safe_open(paths[0], framework="np") as file:
        states, mask = file.get_slice("hidden_states").get_shape(), file.get_tensor("loss_mask")
    print(
        f"{len(paths)} files in {asked.out}; the first has {states} and "
        f"{int(mask.sum())} tokens of an answer"
    )


if __name__ == "__main__":
    main()
