"""`jaxmem generate`: one prompt, a file of them, or a conversation."""

import dataclasses
import sys

from jaxmem.generate.batch import generate_file
from jaxmem.generate.completions import Generator, unreached
from jaxmem.generate.config import GenerateConfig, GenerateRequest, GradingOptions
from jaxmem.generate.conversation import chat
from jaxmem.generate.grading import Grading
from jaxmem.generate.model import Model


def run(request: GenerateRequest) -> None:
    """Run the command; raise a ValueError if the model cannot serve an option."""
    model = Model.of(request, request.chat_template_kwargs)
    generator = Generator(model, request.group(GenerateConfig))
    if generator.cost is not None:
        print(f"jaxmem: {generator.cost}", file=sys.stderr)
    if request.source is not None and request.out is not None:
        grading = Grading(**dataclasses.asdict(request.group(GradingOptions)))
        generate_file(generator, request.source, request.out, grading=grading)
    elif request.prompt is not None:
        _show(generator, request.prompt)
    else:
        chat(generator, request.system)


def _show(generator: Generator, prompt: str) -> None:
    """Print a completion as it is sampled."""
    encoded = generator.prompt(prompt, "PROMPT")
    (completion,) = generator.complete(
        [encoded], lambda piece: print(piece, end="", flush=True)
    )
    print()
    if line := unreached(generator.config.stop, [completion.finish]):
        print(f"jaxmem: {line}", file=sys.stderr)
