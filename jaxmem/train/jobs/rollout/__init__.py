"""Rollouts: prompts, sampling, conversations and what is recorded of them."""
