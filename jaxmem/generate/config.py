"""Options of `jaxmem generate`."""

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated

from jaxmem.base import messages
from jaxmem.base.command_options import (
    CommandOptions,
    Flag,
    ModelOptions,
    Positional,
    TemplateOptions,
)
from jaxmem.base.fields import Must
from jaxmem.base.ranges import integers

if TYPE_CHECKING:  # options of a command import nothing heavy
    from jaxmem.models.truncation import SamplingConfig

_FRACTION = Must("in (0, 1]", lambda value: 0 < value <= 1)


@dataclasses.dataclass(frozen=True)
class GenerateConfig(CommandOptions):
    """Options of sampling, and the bounds of a completion.

    Raises:
        ValueError: an option has an impossible value; the message names its flag.
    """

    max_new_tokens: Annotated[
        int | None,
        integers(1),
        "maximum number of tokens in a completion (default: the space that remains, at "
        "most 256)",
    ] = None
    temperature: Annotated[
        float,
        Must("0 or more, and finite", lambda value: 0 <= value < math.inf),
        "number that divides the logits; 0 takes the most probable token (default "
        "{default})",
    ] = 1.0
    top_k: Annotated[
        int | None, integers(1), "sample only from the TOP_K most probable tokens"
    ] = None
    top_p: Annotated[
        float | None,
        _FRACTION,
        "sample only from the fewest tokens whose total probability reaches TOP_P",
    ] = None
    min_p: Annotated[
        float | None,
        _FRACTION,
        "drop tokens whose probability is below MIN_P times the highest",
    ] = None
    stop: Annotated[
        tuple[str, ...], "text that ends a completion; may be repeated"
    ] = ()
    seed: Annotated[
        int, integers(0, below=2**31), "seed of the random numbers (default {default})"
    ] = 0
    batch_size: Annotated[
        int,
        integers(1),
        "with --in, number of completions to sample at a time (default {default})",
    ] = 8
    samples: Annotated[
        int,
        integers(1),
        "number of completions for each prompt of --in (default {default})",
    ] = 1

    def __post_init__(self):
        """Raise a ValueError that names an option with an impossible value."""
        super().__post_init__()
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                messages.must_be("--samples", "1 at --temperature 0", self.samples)
            )
        if not all(self.stop):
            raise ValueError("--stop must be a text of at least one character, got ''")

    def sampling(self, max_new_tokens: int, vocab_size: int) -> "SamplingConfig":
        """The options of the sampler.

        Args:
            max_new_tokens: of any completion.
            vocab_size: entries of the vocabulary. Without a top_k, top_p and min_p
                select among all of them.

        Raises:
            ValueError: top_k is above that.
        """
        from jaxmem.models.truncation import SamplingConfig

        if self.temperature == 0:
            return SamplingConfig(max_new_tokens, top_k=1)
        if self.top_k is not None and self.top_k > vocab_size:
            expected = f"at most {vocab_size}, the vocabulary"
            raise ValueError(messages.must_be("--top-k", expected, self.top_k))
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


@dataclasses.dataclass(frozen=True)
class GradingOptions(CommandOptions):
    """Options of rewards, and of the completions that are kept; by default all are.

    Raises:
        ValueError: completions are chosen without a reward.
    """

    reward: Annotated[
        str | None,
        Flag(metavar="NAME"),
        "reward to compute for each completion of --in, such as math or FILE.py:NAME",
    ] = None
    keep_best: Annotated[
        bool, "of each prompt, keep only the completion with the highest reward"
    ] = False
    min_reward: Annotated[
        float | None,
        Flag(metavar="R"),
        "keep only completions with a reward of at least R",
    ] = None

    def __post_init__(self):
        super().__post_init__()
        for flag, is_set in {
            "--keep-best": self.keep_best,
            "--min-reward": self.min_reward is not None,
        }.items():
            if is_set and self.reward is None:
                raise ValueError(f"{flag} compares rewards; add --reward NAME")


@dataclasses.dataclass(frozen=True)
class GenerateRequest(GenerateConfig, GradingOptions, TemplateOptions, ModelOptions):
    """Options of the command; exactly one of prompt, source and chat is set."""

    _: dataclasses.KW_ONLY
    prompt: Annotated[str | None, Positional("PROMPT"), "text to complete"] = None
    chat: Annotated[bool, "start a conversation in the terminal"] = False
    system: Annotated[
        str | None, "with --chat, system message at the start of the conversation"
    ] = None
    source: Annotated[
        str | None,
        Flag("--in", "FILE.jsonl"),
        'file of prompts, with lines of {"prompt": text or messages}',
    ] = None
    out: Annotated[
        str | None, Flag(metavar="FILE.jsonl"), "file for the completions of --in"
    ] = None

    def __post_init__(self):
        super().__post_init__()
        modes = self.prompt is not None, self.source is not None, self.chat
        if self.prompt is not None and self.chat:
            raise ValueError(
                "PROMPT cannot be combined with --chat: jaxmem completes PROMPT as "
                "plain text, and --chat reads messages; leave one of them out"
            )
        if sum(modes) != 1:
            raise ValueError(
                "jaxmem generate needs one of PROMPT, --in FILE.jsonl and --chat"
            )
        if (self.source is None) != (self.out is None):
            raise ValueError("--in FILE.jsonl and --out FILE.jsonl need each other")
        if self.system is not None and not self.chat:
            raise ValueError("--system needs --chat")
        of_files = {"--samples": self.samples > 1, "--reward": self.reward is not None}
        for flag, is_set in of_files.items():
            if is_set and self.source is None:
                raise ValueError(f"{flag} needs --in FILE.jsonl")
