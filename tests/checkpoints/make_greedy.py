"""Writes greedy.npz: what transformers completes greedily, with the tiny checkpoints.

Run with torch and transformers (2.13 and 5.23 wrote the committed file), after
make_tiny.py:

    python tests/checkpoints/make_greedy.py

NAME is [prompts, tokens] in float32, each prompt alone, padded with -1 after the end of
sequence; prompts and lengths are the right-padded prompts.
"""

import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
NAMES = ("qwen3", "mistral", "llama")
LENGTHS = (3, 9, 1, 6)
TOKENS = 12


def main():
    prompts = np.random.default_rng(4).integers(3, 40, (len(LENGTHS), max(LENGTHS)))
    recorded = {"prompts": prompts, "lengths": np.array(LENGTHS)}
    for name in NAMES:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            HERE / "tiny" / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        rows = np.full((len(LENGTHS), TOKENS), -1)
        for row, ids, length in zip(rows, prompts, LENGTHS, strict=True):
            prompt = torch.from_numpy(ids[None, :length])
            whole = model.generate(
                prompt, do_sample=False, max_new_tokens=TOKENS, eos_token_id=2
            )
            new = whole[0, length:].numpy()
            row[: len(new)] = new
        recorded[name] = rows
        print(name, rows.tolist())
    np.savez_compressed(HERE / "greedy.npz", **recorded)


if __name__ == "__main__":
    main()
