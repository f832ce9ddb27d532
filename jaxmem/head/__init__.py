"""The head without logits: functions of hidden states and a vocabulary matrix.

`jaxmem.logprobs` is the first to read; docs/code.md follows it through nine files.
"""

from jaxmem.base import imports
from jaxmem.head.maths.call_report import report as report
from jaxmem.head.maths.gradients import (
    Recompute as Recompute,
    Recorded as Recorded,
    Sample as Sample,
)
from jaxmem.head.maths.head import Head as Head
from jaxmem.head.maths.recorded import RecordedEntries as RecordedEntries
from jaxmem.head.maths.row_stats import TokenStats as TokenStats
from jaxmem.head.verbs.api import (
    entropy as entropy,
    logprobs as logprobs,
    logprobs_from_logits as logprobs_from_logits,
    token_stats as token_stats,
    token_stats_from_logits as token_stats_from_logits,
)
from jaxmem.head.verbs.column_targets import Columns as Columns, Drawn as Drawn
from jaxmem.head.verbs.divergence import divergence as divergence
from jaxmem.head.verbs.divergence_loss import divergence_loss as divergence_loss
from jaxmem.head.verbs.draws import sample_ids as sample_ids
from jaxmem.head.verbs.kinds import (
    JSD as JSD,
    ForwardKL as ForwardKL,
    ReverseKL as ReverseKL,
)
from jaxmem.head.verbs.recording import record_entries as record_entries
from jaxmem.head.verbs.selected import selected_logprobs as selected_logprobs
from jaxmem.head.verbs.single_pass import token_loss as token_loss
from jaxmem.head.verbs.support import support_logprobs as support_logprobs
from jaxmem.head.verbs.teacher import Teacher as Teacher
from jaxmem.head.verbs.topk import TopK as TopK, topk as topk

__dir__ = imports.public_dir(__name__)
