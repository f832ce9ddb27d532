"""A tokenizer of forty tokens, for the tiny checkpoints."""

import json
import pathlib
import shutil

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from tests.helpers import seeded

TINY = seeded.CHECKPOINTS / "tiny"
# A multimodal model but for its "text_config", which is a model of its own.
MISTRAL_3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": 10,
    "spatial_merge_size": 2,
    "vision_config": {"model_type": "pixtral"},
}
QWEN3_5_MOE = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 9,
    "vision_config": {},
}
NESTED = {  # by the record of the text part, in families/
    "gemma4": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "image_token_id": 9,
        "vision_config": {},
    },
    "llama4": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "image_token_index": 9,
        "vision_config": {},
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": 9,
        "vision_config": {},
    },
}
SPECIAL = ("<pad>", "<s>", "</s>")
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.01234567"


def tokenizer(*, start=True, more=(), letters=LETTERS):
    """Letters are tokens; with a template that puts <s> before a text."""
    words = [*SPECIAL, *letters, *more]
    vocabulary = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(list(SPECIAL))
    if start:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return made


def checkpoint(name, directory, **options):
    """A tiny checkpoint, of tiny/ or families/, with such a tokenizer."""
    if (TINY / name).exists():
        directory = pathlib.Path(shutil.copytree(TINY / name, directory / name))
    else:
        record = np.load(seeded.RECORDS / f"{name}.npz")
        directory = seeded.write(record, pathlib.Path(directory) / name)
    return with_tokenizer(directory, **options)


def coded_checkpoint(name, directory):
    """A tiny checkpoint of bitsandbytes/, with such a tokenizer."""
    source = TINY.parent / "bitsandbytes" / name
    return with_tokenizer(
        pathlib.Path(shutil.copytree(source, pathlib.Path(directory) / name))
    )


def with_tokenizer(directory, **options):
    """The directory of a checkpoint, after such a tokenizer is saved in it."""
    tokenizer(**options).save(str(directory / "tokenizer.json"))
    named = {"eos_token": {"content": "</s>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory
