"""The start of the residual stream: embeddings of tokens and, if learnt, positions."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.models import coded_weights, partitioning
from jaxmem.models.coded_linear import CodedArrays
from jaxmem.models.config import ModelConfig
from jaxmem.models.positions import Ids

# Small enough for a first loss of about ln(vocab_size), whatever the width.
INIT = nnx.initializers.normal(0.02)


class Table(nnx.Embed):
    """`nnx.Embed`, whose rows are looked up on a mesh, too."""

    def vectors(self, tokens: jax.Array) -> jax.Array:
        """Rows [..., features] at tokens, in the type of the table."""
        return _rows(self.embedding[...], tokens)


class CodedTable(CodedArrays):
    """A frozen table [rows, features] in 8 bits, with a scale for each row."""

    matrix_name = "embedding"

    def __init__(self, rows: int, config: ModelConfig, rngs: nnx.Rngs):
        self.param_dtype = jnp.dtype(config.param_dtype)
        shape = rows, config.hidden
        drawn = INIT(rngs.params(), shape, self.param_dtype)
        self.set_arrays(coded_weights.encode(drawn, "int8", block=config.hidden))

    def vectors(self, tokens: jax.Array) -> jax.Array:
        """Rows [..., features] at tokens, in the type that the table was coded from."""
        arrays = self.codes
        scales = jnp.take(arrays["scales"], tokens, axis=0)  # on every device
        rows = {"codes": _rows(arrays["codes"], tokens), "scales": scales}
        return coded_weights.decode(rows, self.param_dtype)


def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    if partitioning.current() is None:
        return jnp.take(table, tokens, axis=0)
    return partitioning.look_up(table, tokens)


def of_tokens(config: ModelConfig, rngs: nnx.Rngs) -> Any:
    """The embedding table of the vocabulary, coded if the config says so."""
    if config.vocab_size is None:
        raise ValueError(
            "ModelConfig.vocab_size is None: set it, or take it from the tokenizer "
            "with dataclasses.replace(config, vocab_size=...)"
        )
    if config.codes_embedding:
        return CodedTable(config.vocab_size, config, rngs)
    return table(config, config.vocab_size, rngs)


def table(
    config: ModelConfig, rows: int, rngs: nnx.Rngs, width: int | None = None
) -> Table:
    """A table of vectors [rows, width]; None: the width of the residual stream."""
    return Table(
        rows,
        width or config.hidden,
        embedding_init=INIT,
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def rows(table: Table | CodedTable, tokens: Ids, pad_row: int | None) -> jax.Array:
    """Vectors [B, T, width] of tokens, in the dtype that the table has.

    Those of the token `pad_row` have no gradient, as with `padding_idx` of torch's
    `nn.Embedding`: norms divide by the vector's length, which is 0 where transformers
    has initialised it, and such gradients would be as large as all others together.

    Vectors are cast afterwards, so that the gradients of a frequent token are summed in
    that dtype: trained tables are in float32, whatever the table was initialised in.
    """
    tokens = jnp.asarray(tokens)
    rows = table.vectors(tokens)
    if pad_row is None:
        return rows
    is_pad = (tokens == pad_row)[..., None]
    return jnp.where(is_pad, jax.lax.stop_gradient(rows), rows)


def look_up(decoder: Any, tokens: Ids, positions: Ids) -> jax.Array:
    """Embeddings [B, T, hidden] of a decoder's tokens at their positions."""
    config = decoder.config
    x = rows(decoder.embed, tokens, config.pad_row).astype(config.dtype)
    multiplier = config.embedding.multiplier
    if config.embedding.scaled:
        multiplier *= config.hidden**0.5
    if multiplier != 1:
        x = x * jnp.asarray(multiplier, x.dtype)
    if config.embedding.positions is not None:
        # A position that is not in the table makes its token NaN.
        learned = decoder.positions.embedding[...].at[jnp.asarray(positions)]
        x = x + learned.get(mode="fill", fill_value=jnp.nan).astype(config.dtype)
    return decoder.embed_norm(x) if config.embedding.norm else x


def check_length(config: ModelConfig, tokens: int) -> None:
    """Raise a ValueError for rows of more tokens than there are positions."""
    most = config.embedding.positions
    if most is not None and tokens > most:
        raise ValueError(
            f"a row must have at most {most} tokens, the positions of this model "
            f"(model.embedding.positions), got {tokens}"
        )
