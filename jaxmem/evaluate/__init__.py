"""Benchmarks of saved models through lm-evaluation-harness: `jaxmem eval`."""
