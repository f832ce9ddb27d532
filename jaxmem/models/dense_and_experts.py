"""A dense feed-forward layer beside a mixture of experts, whose results are added."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem import remat
from jaxmem.models import routing
from jaxmem.models.balance import Choice
from jaxmem.models.config import ModelConfig
from jaxmem.models.feed_forward import FeedForward
from jaxmem.models.mixture import Experts
from jaxmem.models.norms import make_norm


class DenseAndExperts(FeedForward):
    """norm(dense(x)) + norm(Σ_k weight_k expert_k(norm(s))), s the residual stream.

    The router reads s, normalised without a scale of the norm's own. It is an
    `interfaces.FeedForward`; the dense part has the paths of a dense layer.
    """

    reads_stream = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        assert config.experts is not None
        dtype, wide = jnp.dtype(config.param_dtype), jnp.float32
        self.router = nnx.Linear(
            config.hidden, config.experts, use_bias=False, dtype=wide,
            param_dtype=dtype, precision="highest", rngs=rngs,
        )  # fmt: skip
        self.router_scale = nnx.Param(jnp.ones(config.hidden, dtype))
        self.expert_scale = nnx.Param(jnp.ones(config.experts, dtype))
        plain = dataclasses.replace(config, norm_scale=False)
        self.router_norm = make_norm(plain, config.hidden, rngs)
        self.experts = Experts(config, rngs=rngs)
        norm = functools.partial(make_norm, config, config.hidden, rngs)
        self.dense_norm, self.mixed_norm, self.stream_norm = norm(), norm(), norm()
        self.config = config

    def join(
        self, *projected: jax.Array, chosen: jax.Array | None = None
    ) -> tuple[jax.Array, Choice]:
        """As `Mixture.join`, from the results of `readers` and the residual stream."""
        *dense, stream = projected
        out = self.dense_norm(super().join(*dense)[0])
        mixed, choice = remat.recompute(self._mix)(stream, chosen)
        return out + mixed, choice

    def _mix(
        self, stream: jax.Array, chosen: jax.Array | None
    ) -> tuple[jax.Array, Choice]:
        scale = self.router_scale[...].astype(jnp.float32)
        x = self.router_norm(stream).astype(jnp.float32) * scale
        logits = self.router(x * self.config.hidden**-0.5)
        choice, weights = routing.decide(logits, None, self.config, chosen)
        scale = self.expert_scale[...].astype(jnp.float32)[choice.chosen]
        out = self.experts(self.stream_norm(stream), choice.chosen, weights * scale)
        return self.mixed_norm(out.astype(stream.dtype)), choice
