"""The jobs: one file each, and what only it needs; `train` runs any of them."""

from jaxmem.train.jobs import sft, grpo, dpo, distill  # noqa: F401, I001
from jaxmem.train.jobs.job import JOBS as JOBS, Job as Job, job_of as job_of
from jaxmem.train.jobs.running import Result as Result, train as train
from jaxmem.train.settings import JobConfig as JobConfig
