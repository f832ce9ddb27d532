"""Language-model heads, training and RL post-training in JAX that fit in memory."""

import typing

from jaxmem import losses as losses, packing as packing, sharding as sharding
from jaxmem._version import __version__ as __version__
from jaxmem.base import imports
from jaxmem.head import (
    JSD as JSD,
    Columns as Columns,
    Drawn as Drawn,
    ForwardKL as ForwardKL,
    RecordedEntries as RecordedEntries,
    ReverseKL as ReverseKL,
    Teacher as Teacher,
    TokenStats as TokenStats,
    TopK as TopK,
    divergence as divergence,
    divergence_loss as divergence_loss,
    entropy as entropy,
    logprobs as logprobs,
    logprobs_from_logits as logprobs_from_logits,
    record_entries as record_entries,
    report as report,
    sample_ids as sample_ids,
    selected_logprobs as selected_logprobs,
    support_logprobs as support_logprobs,
    token_loss as token_loss,
    token_stats as token_stats,
    token_stats_from_logits as token_stats_from_logits,
    topk as topk,
)
from jaxmem.head.maths.gradients import (
    Recompute as Recompute,
    Recorded as Recorded,
    Sample as Sample,
)
from jaxmem.head.maths.head import Head as Head
from jaxmem.losses.mismatch import mismatch_report as mismatch_report

if typing.TYPE_CHECKING:
    from jaxmem import (
        checkpoints as checkpoints,
        data as data,
        devices as devices,
        heads as heads,
        integrations as integrations,
        models as models,
        planning as planning,
        remat as remat,
        score as score,
        train as train,
    )
    from jaxmem.planning import plan as plan
    from jaxmem.remat import offload as offload
else:  # at their first use: some need an extra
    __getattr__, __dir__ = imports.lazy(
        __name__,
        "checkpoints", "data", "devices", "heads", "integrations", "losses", "models",
        "offload", "packing", "planning", "remat", "score", "sharding", "train",
        plan="planning",
    )  # fmt: skip
