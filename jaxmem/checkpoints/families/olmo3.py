"""OLMo 3: OLMo 2 with windows; only the other layers' wavelengths are scaled."""

from jaxmem.checkpoints.families import olmo2
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import TwoRopes
from jaxmem.checkpoints.families.windows import Windows, but_every_last_of

FAMILY = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    parts=(
        *olmo2.PARTS,
        TwoRopes(500_000.0, 500_000.0, local_key=None),
        Windows(but_every_last_of(4), 4096),
    ),
    names=olmo2.NAMES,
    switches=olmo2.SWITCHES,
)
