"""Chat templates, and a tokenizer of bytes with their special tokens."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + "
    "' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- for m in messages %}\n    {{- '<|start|>' + m['role'] + "
    "'<|sep|>\n\n' + m['content'] | trim + '<|eot|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start|>assistant<|sep|>\n\n' }}\n"
    "{%- endif %}\n"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% set role = 'model' %}{% else %}{% set role = m['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|sep|>", "<|eot|>",
    "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>",
    "<|turn|>", "<|/turn|>",
]  # fmt: skip
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, and the marks of every template as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("H", "e"), ("Ġ", "t"), ("Ċ", "Ċ"), ("Ġ", "4"), ("o", "r")]
    words = [*alphabet, *(a + b for a, b in pairs)]
    made = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return made


def with_edges(tokenizer):
    made = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[(w, tokenizer.token_to_id(w)) for w in ("<s>", "</s>")],
    )
    return made
