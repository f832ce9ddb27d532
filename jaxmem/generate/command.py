"""`jaxmem generate`: one prompt, a file of them, or a conversation."""

import sys
from typing import Any, NamedTuple

from jaxmem.generate.batch import generate_file
from jaxmem.generate.completions import Generator, unreached
from jaxmem.generate.config import GenerateConfig
from jaxmem.generate.conversation import chat
from jaxmem.generate.grading import Grading
from jaxmem.generate.model import load


class GenerateRequest(NamedTuple):
    """Options of the command; exactly one of prompt, source and chat is set."""

    model: str  # directory
    adapter: str | None
    dtype: str | None
    prompt: str | None
    source: str | None  # .jsonl file of prompts
    out: str | None  # .jsonl file of completions
    chat: bool
    system: str | None  # first message of a conversation
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the template
    factory: str | None = None  # of a run of model.factory
    trust_code: bool = False  # True if the code that the run names may be run
    base: str | None = None  # codes of matrices; None: they are as stored
    reward: str | None = None  # these three as in `Grading`
    keep_best: bool = False
    min_reward: float | None = None

    @property
    def grading(self) -> Grading:
        """The rewards of a file's completions."""
        return Grading(self.reward, self.keep_best, self.min_reward)


def run(request: GenerateRequest, config: GenerateConfig) -> None:
    """Run the command; raise a ValueError that names options that are impossible."""
    _check(request, config)
    model = load(
        request.model,
        adapter=request.adapter,
        dtype=request.dtype,
        chat_template_kwargs=request.chat_template_kwargs,
        factory=request.factory,
        trust_code=request.trust_code,
        base=request.base,
    )
    generator = Generator(model, config)
    if generator.cost is not None:
        print(f"jaxmem: {generator.cost}", file=sys.stderr)
    if request.source is not None and request.out is not None:
        generate_file(generator, request.source, request.out, grading=request.grading)
    elif request.prompt is not None:
        _show(generator, request.prompt)
    else:
        chat(generator, request.system)


def _check(request: GenerateRequest, config: GenerateConfig) -> None:
    modes = request.prompt is not None, request.source is not None, request.chat
    if request.prompt is not None and request.chat:
        raise ValueError(
            "PROMPT cannot be combined with --chat: jaxmem completes PROMPT as plain "
            "text, and --chat reads messages; leave one of them out"
        )
    if sum(modes) != 1:
        raise ValueError(
            "jaxmem generate needs one of PROMPT, --in FILE.jsonl and --chat"
        )
    if (request.source is None) != (request.out is None):
        raise ValueError("--in FILE.jsonl and --out FILE.jsonl need each other")
    if request.system is not None and not request.chat:
        raise ValueError("--system needs --chat")
    of_files = {"--samples": config.samples > 1, "--reward": request.reward is not None}
    for flag, is_set in of_files.items():
        if is_set and request.source is None:
            raise ValueError(f"{flag} needs --in FILE.jsonl")
    _ = request.grading  # for its errors


def _show(generator: Generator, prompt: str) -> None:
    """Print a completion as it is sampled."""
    encoded = generator.prompt(prompt, "PROMPT")
    (completion,) = generator.complete(
        [encoded], lambda piece: print(piece, end="", flush=True)
    )
    print()
    if line := unreached(generator.config.stop, [completion.finish]):
        print(f"jaxmem: {line}", file=sys.stderr)
