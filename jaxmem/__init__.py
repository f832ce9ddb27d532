"""Language-model heads, training and RL post-training in JAX that fit in memory."""

from jaxmem._version import __version__ as __version__
