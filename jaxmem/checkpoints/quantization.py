"""The `quantization_config` of a checkpoint: the coding of matrices, or a refusal.

bitsandbytes' nf4 and 8 bits are read (`bitsandbytes`). Each other method of
transformers has matrices of its own layout, and is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from jaxmem.base import messages
from jaxmem.checkpoints.config_reader import Reader

KEY = "quantization_config"
_ADVICE = "name the model in 16 bits, or one that bitsandbytes coded in nf4 or 8 bits"
# Names of methods that differ from those in `quant_method`.
_METHODS = {
    "gptq": "GPTQ", "awq": "AWQ", "mxfp4": "MXFP4", "fp8": "FP8", "aqlm": "AQLM",
    "fbgemm_fp8": "FP8", "hqq": "HQQ", "gguf": "GGUF", "nvfp4": "NVFP4",
}  # fmt: skip


def read_coding(reader: Reader) -> str | None:
    """The coding that a config names, as `model.base` names it; None: no coding.

    Raises:
        CheckpointError: the coding is not read; the message names it.
    """
    config = reader.take(KEY, (dict, type(None)), None)
    if config is None:
        return None
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # older files have no method
    if method != "bitsandbytes":
        raise _refusal(reader, method, config)
    if config.get("load_in_4bit") is True and config.get("load_in_8bit") is True:
        raise reader.error(
            f"{KEY} has both load_in_4bit and load_in_8bit; set the one that does not "
            "describe the matrices to false"
        )
    if config.get("load_in_8bit") is True:
        return "int8"
    if config.get("load_in_4bit") is not True:
        raise reader.error(
            f"{KEY} sets neither load_in_4bit nor load_in_8bit to true; {_ADVICE}"
        )
    kind = config.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        raise reader.error(
            f"{KEY}: matrices are coded in bitsandbytes' {messages.short(kind)}, "
            f"which jaxmem does not read; {_ADVICE}"
        )
    return "nf4"


def _refusal(reader: Reader, method: Any, config: Mapping[str, Any]) -> Exception:
    """The error for another method than bitsandbytes."""
    if not isinstance(method, str):
        return reader.error(
            f"{KEY}={messages.short(config)} does not name a quant_method; {_ADVICE}"
        )
    known = _METHODS.get(method, method)
    return reader.error(
        f"{KEY}: jaxmem does not read quant_method "
        f"{messages.short(method)}{f' ({known})' if known != method else ''}; "
        f"{_ADVICE}"
    )
