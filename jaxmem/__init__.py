"""Language-model heads, training and RL post-training in JAX that fit in memory."""

from jaxmem import losses as losses
from jaxmem import packing as packing
from jaxmem import sharding as sharding
from jaxmem._divergence import forward_kl as forward_kl
from jaxmem._divergence import jsd as jsd
from jaxmem._divergence import kl as kl
from jaxmem._head import entropy as entropy
from jaxmem._head import logprobs as logprobs
from jaxmem._head import logprobs_from_logits as logprobs_from_logits
from jaxmem._head import token_stats as token_stats
from jaxmem._head import token_stats_from_logits as token_stats_from_logits
from jaxmem._mismatch import mismatch_report as mismatch_report
from jaxmem._report import report as report
from jaxmem._selected import selected_logprobs as selected_logprobs
from jaxmem._selected import support_logprobs as support_logprobs
from jaxmem._stats import TokenStats as TokenStats
from jaxmem._token_loss import token_loss as token_loss
from jaxmem._version import __version__ as __version__
