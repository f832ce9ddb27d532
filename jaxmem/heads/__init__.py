"""Drop-in Flax heads: `from jaxmem.heads.nnx import LMHead`, or `.linen`.

Nothing is imported here, so that each needs only the Flax that it is written for.
"""
