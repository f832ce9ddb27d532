"""Writes expected.json: what lm-eval's transformers model says of a tiny checkpoint.

Run with torch, transformers and lm-eval (2.13, 5.24 and 0.4.13 wrote the committed
file) from the root of the repository:

    python -m tests.evaluate.make_expected

That model puts the start of sequence before a context only with add_bos_token, with
which it also scores that token in whole texts; those are recorded without.
"""

import json
import pathlib
import tempfile

import tokenizers
from lm_eval.api.instance import Instance

from tests.helpers import texts

HERE = pathlib.Path(__file__).parent
LONG = "the head of a model maps each hidden state to a token, " * 4
PAIRS = [
    ("", "noon"), ("a cat ", "sat"), ("a cat", " sat"), ("one two ", "three, four"),
    (LONG, "last"), ("  ", "y"),
]  # fmt: skip
TEXTS = ["a", "some words here", LONG, ""]
PROMPTS = [
    ("one two", {"until": ["."], "max_gen_toks": 8}),
    ("a cat", {"until": [], "max_gen_toks": 5}),
    (LONG, {"until": ["q", "</s>"], "max_gen_toks": 12}),
]


def instances(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=given, idx=i)
        for i, given in enumerate(arguments)
    ]


def checkpoint(folder):
    """Its tokens are letters, decoded without spaces."""
    directory = texts.checkpoint("llama", pathlib.Path(folder))
    path = str(directory / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(path)
    return directory


def pairs_of(model):
    """[log-probability, is greedy] of each continuation."""
    made = model.loglikelihood(instances("loglikelihood", PAIRS))
    return [[float(logprob), bool(greedy)] for logprob, greedy in made]


def texts_of(model):
    """Log-probabilities of whole texts."""
    alone = [(text,) for text in TEXTS]
    made = model.loglikelihood_rolling(instances("loglikelihood_rolling", alone))
    return [float(logprob) for logprob in made]


def completions_of(model, prompts=PROMPTS):
    """Completions of the prompts."""
    return model.generate_until(instances("generate_until", prompts))


def main():
    import transformers
    from lm_eval.models.huggingface import HFLM

    with tempfile.TemporaryDirectory() as folder:
        directory = checkpoint(folder)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"),
            bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        )  # fmt: skip
        with_start, without = (
            HFLM(
                str(directory), tokenizer=tokenizer, dtype="float32", device="cpu",
                add_bos_token=start, max_length=64, batch_size=1,
            )
            for start in (True, False)
        )  # fmt: skip
        made = {
            "pairs": pairs_of(with_start),
            "texts": texts_of(without),
            "completions": completions_of(with_start),
        }
    (HERE / "expected.json").write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
