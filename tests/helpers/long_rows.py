"""Training on long rows, over a mesh or on one GPU."""

from jaxmem.data.documents import DataConfig
from jaxmem.models.decoder import ModelConfig
from jaxmem.models.partitioning import MeshConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.train.jobs.config import SftJobConfig
from jaxmem.train.optimizer import OptimizerConfig
from jaxmem.train.settings import RunConfig

MODEL = ModelConfig(
    layers=4, hidden=256, ff=512, heads=4, kv_heads=2, head_dim=64, vocab_size=8192,
    dtype="bfloat16",
)  # fmt: skip
ROWS = DataConfig(sequence_length=512, batch_size=4)


def config_of(model, axis=None):
    return SftJobConfig(
        data=ROWS, model=model, head=HeadConfig(chunk=128),
        optimizer=OptimizerConfig(warmup_steps=1), run=RunConfig(steps=3),
        mesh=MeshConfig(**({axis: 2} if axis else {})),
    )  # fmt: skip
