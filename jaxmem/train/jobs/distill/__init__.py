"""Distillation from a teacher."""

from jaxmem.train.jobs.distill.job import Distill as Distill
