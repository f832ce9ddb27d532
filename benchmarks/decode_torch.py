"""torch's side of `run_decode`: transformers' `generate` on its Qwen3 or Qwen3-MoE.

With a dynamic cache, as it is by default, and with a static one, for which `generate`
compiles the model's step. A step's milliseconds are those of all tokens without those
of a completion of one, by the number of further tokens.
"""

import functools
import json
import statistics
import sys
import time
import traceback

import torch

from benchmarks import on_torch, workers
from benchmarks.run_decode import SAMPLING, Variant

DEVICE = on_torch.DEVICE
REPEATS = 3
CACHES = {"transformers": "dynamic", "transformers, compiled": "static"}


def random_model(sizes):
    """transformers' decoder with its head, random weights drawn on the device."""
    import transformers

    config = on_torch.decoder_config(sizes, 4096, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, sizes.dtype))
    with torch.device(DEVICE):
        network = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa"
        )
    return network.eval()


def seconds(run) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(model, variant: Variant, rows: int, cache: str) -> dict:
    """Columns of a row."""
    shape = rows, variant.prompt
    ids = torch.randint(0, model.config.vocab_size, shape, device=DEVICE)
    options = {"top_k": 0, "temperature": 1.0, **SAMPLING[variant.sampling]}
    if options["temperature"] == 0:
        options = {"do_sample": False}
    else:
        options["do_sample"] = True
    generate = functools.partial(
        model.generate,
        ids,
        attention_mask=torch.ones_like(ids),
        cache_implementation=cache,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )

    def timed(new):
        return seconds(lambda: generate(max_new_tokens=new, min_new_tokens=new))

    compile_s = timed(variant.new)
    timed(1)
    one = statistics.median(timed(1) for _ in range(REPEATS))
    all_ = [timed(variant.new) for _ in range(REPEATS)]
    steps = [(each - one) * 1e3 / (variant.new - 1) for each in all_]
    middle = statistics.median(steps)
    return {
        "step_ms": round(middle, 3),
        "step_spread": round((max(steps) - min(steps)) / middle, 3),
        "tokens_per_second": round(rows / middle * 1e3),
        "prefill_ms": round(one * 1e3, 2),
        "prefill_tokens_per_second": round(rows * variant.prompt / one),
        "advance_compile_s": round(compile_s, 1),
    }


def main(text: str) -> None:
    job = json.loads(text)
    import transformers

    from jaxmem.train import configuration

    config, _ = configuration.load(job["config"], job["overrides"])
    model = random_model(config.model)
    variants = [Variant(*each) for each in job["variants"]]
    for path, cache in CACHES.items():
        for variant in variants if cache == "static" else variants[:1]:
            row = {"path": path, **variant.columns(job["rows"])}
            if time.time() > job["until"]:
                print(f"no time is left for {path}, {variant.name}", flush=True)
                continue
            try:
                with torch.no_grad():
                    row |= measure(model, variant, job["rows"], cache)
            except Exception as error:  # the others are measured all the same
                traceback.print_exc(file=sys.stdout)
                row["note"] = workers.said(error)
            versions = {"transformers": transformers.__version__}
            workers.send({**row, **versions, **on_torch.provenance()})


if __name__ == "__main__":
    main(sys.argv[1])
