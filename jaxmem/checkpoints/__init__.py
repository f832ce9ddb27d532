"""Hugging Face checkpoints: directories with config.json and safetensors files.

    directory = checkpoints.local_directory("Qwen/Qwen3-0.6B")  # of the Hub
    decoder = checkpoints.load(directory, dtype="bfloat16")
    checkpoints.save("finetuned", decoder, like=directory)

The architectures are in `families`, one file each.
"""

from jaxmem.base.hub import local_directory as local_directory
from jaxmem.checkpoints.adapters import save_adapter as save_adapter
from jaxmem.checkpoints.architectures import (
    CheckpointConfig as CheckpointConfig,
    CheckpointError as CheckpointError,
    read_config as read_config,
)
from jaxmem.checkpoints.config_reader import ignoring_keys as ignoring_keys
from jaxmem.checkpoints.config_writer import (
    Text as Text,
    describe as describe,
    describe_known as describe_known,
    write_text_files as write_text_files,
)
from jaxmem.checkpoints.directories import copy_text_files as copy_text_files
from jaxmem.checkpoints.merging import merge as merge, merge_codes as merge_codes
from jaxmem.checkpoints.tokenizer_files import (
    Vocabulary as Vocabulary,
    add_end as add_end,
    check_tokens as check_tokens,
    end_ids as end_ids,
    load_vocabulary as load_vocabulary,
    vocabulary_digest as vocabulary_digest,
)
from jaxmem.checkpoints.weight_files import (
    as_known as as_known,
    configured as configured,
    kernels_of as kernels_of,
    load as load,
    read_weights as read_weights,
    save as save,
    save_new as save_new,
    with_adapter as with_adapter,
    with_checkpoint as with_checkpoint,
)
