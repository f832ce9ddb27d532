"""Reinforcement learning with rewards that are functions."""

from jaxmem.train.jobs.grpo.job import Grpo as Grpo
