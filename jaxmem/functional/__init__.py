"""The public functions of hidden states and a vocabulary matrix."""

from jaxmem import _imports
from jaxmem.functional.api import (
    entropy as entropy,
    logprobs as logprobs,
    logprobs_from_logits as logprobs_from_logits,
    token_stats as token_stats,
    token_stats_from_logits as token_stats_from_logits,
)
from jaxmem.functional.divergence import divergence as divergence
from jaxmem.functional.divergence_loss import divergence_loss as divergence_loss
from jaxmem.functional.draws import sample_ids as sample_ids
from jaxmem.functional.given_columns import Columns as Columns, Drawn as Drawn
from jaxmem.functional.kinds import (
    JSD as JSD,
    ForwardKL as ForwardKL,
    ReverseKL as ReverseKL,
)
from jaxmem.functional.largest import TopK as TopK, topk as topk
from jaxmem.functional.selected import selected_logprobs as selected_logprobs
from jaxmem.functional.single_pass import token_loss as token_loss
from jaxmem.functional.support import support_logprobs as support_logprobs
from jaxmem.functional.teacher import Teacher as Teacher

__dir__ = _imports.public_dir(__name__)
