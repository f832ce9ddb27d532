"""Codes of matrices, by one program for each shape: most of them are tiny."""

import jax

from jaxmem.models import coded_weights

encode = jax.jit(coded_weights.encode, static_argnames=("base", "double", "block"))
decode = jax.jit(coded_weights.decode, static_argnames="dtype")
