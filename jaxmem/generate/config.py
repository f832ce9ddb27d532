"""Options of `jaxmem generate`."""

import dataclasses
import math

from jaxmem.models.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Options of sampling, and the bounds of a completion."""

    # maximum tokens of a completion. None: as many as the model has room for, at most
    # 256
    max_new_tokens: int | None = None
    # divisor of the logits; 0 takes the most probable token each time
    temperature: float = 1.0
    # number of most probable tokens among which to sample. None: no such limit
    top_k: int | None = None
    # sample among the fewest tokens whose probabilities sum to at least this. None: no
    # such limit
    top_p: float | None = None
    # drop tokens whose probability is below this fraction of the highest one. None: no
    # such limit
    min_p: float | None = None
    # texts that end a completion; the completion does not contain them
    stop: tuple[str, ...] = ()
    seed: int = 0  # seed of the samples; the same seed gives the same completions
    batch_size: int = 8  # number of completions that are sampled together
    samples: int = 1  # number of completions per prompt of a file

    def __post_init__(self):
        """Raise a ValueError that names an option with an impossible value."""
        for name in ("max_new_tokens", "batch_size", "top_k", "samples"):
            value = getattr(self, name)
            _check(name, value, value is None or value >= 1, "at least 1")
        possible = 0 <= self.temperature < math.inf
        _check("temperature", self.temperature, possible, "0 or more, and finite")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            _check(name, value, value is None or 0 < value <= 1, "in (0, 1]")
        _check("seed", self.seed, 0 <= self.seed < 2**31, "in [0, 2**31)")
        differ = self.samples == 1 or self.temperature > 0
        _check("samples", self.samples, differ, "1 at --temperature 0")
        _check("stop", "", all(self.stop), "a text of at least one character")

    def sampling(self, max_new_tokens: int, vocab_size: int) -> SamplingConfig:
        """The options of the sampler.

        Args:
            max_new_tokens: of any completion.
            vocab_size: entries of the vocabulary. Without a top_k, top_p and min_p
                select among all of them.

        Raises:
            ValueError: top_k is above that.
        """
        if self.temperature == 0:
            return SamplingConfig(max_new_tokens, top_k=1)
        if self.top_k is not None:
            fits = self.top_k <= vocab_size
            _check("top_k", self.top_k, fits, f"at most {vocab_size}, the vocabulary")
        top_p = None if self.top_p == 1 else self.top_p
        among_all = self.top_k is None and (top_p or self.min_p) is not None
        return SamplingConfig(
            max_new_tokens,
            self.temperature,
            top_k=self.top_k,
            top_p=top_p,
            min_p=self.min_p,
            support=vocab_size if among_all else None,
        )


def _check(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        flag = f"--{name.replace('_', '-')}"
        raise ValueError(f"{flag} must be {expected}, got {value!r}")
