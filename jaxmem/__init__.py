"""Language-model heads, training and RL post-training in JAX that fit in memory."""

from jaxmem import losses as losses, packing as packing, sharding as sharding
from jaxmem._version import __version__ as __version__
from jaxmem.core.report import report as report
from jaxmem.core.stats import TokenStats as TokenStats
from jaxmem.functional.api import (
    entropy as entropy,
    logprobs as logprobs,
    logprobs_from_logits as logprobs_from_logits,
    token_stats as token_stats,
    token_stats_from_logits as token_stats_from_logits,
)
from jaxmem.functional.divergence import forward_kl as forward_kl, jsd as jsd, kl as kl
from jaxmem.functional.selected import (
    selected_logprobs as selected_logprobs,
    support_logprobs as support_logprobs,
)
from jaxmem.functional.single_pass import token_loss as token_loss
from jaxmem.losses.mismatch import mismatch_report as mismatch_report
