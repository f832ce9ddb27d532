"""transformers and peft themselves: what jaxmem saves, they load, to the same logits.

Runs where torch, transformers and peft are installed. They are in no extra: without an
index of its own, torch brings gigabytes of CUDA. test_weights.py and test_adapters.py
hold jaxmem against what the three computed, in files that make_tiny.py wrote.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import checkpoints
from tests.helpers import decoders, texts
from tests.helpers.architectures import KNOWN, SMALL

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
torch = pytest.importorskip("torch", reason="needs torch, transformers and peft")
transformers = pytest.importorskip("transformers", reason="likewise")
peft = pytest.importorskip("peft", reason="likewise")

TINY = pathlib.Path(__file__).parent / "tiny"
NAMES = sorted(path.name for path in TINY.iterdir())


@jax.jit
def ours(decoder, tokens):
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, jnp.ones_like(tokens), places))


def theirs(model, tokens):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits.float().numpy()


def tokens():
    return np.random.default_rng(1).integers(3, 40, (2, 12))


def loaded(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shard", [10**9, 6_000])
def test_saved_model_loads_to_same_logits(name, shard, tmp_path):
    decoder = checkpoints.load(TINY / name, dtype="float32", param_dtype="float32")
    # Other weights than those in the file, so that reading the source would show.
    for weight in (decoder.embed.embedding, decoder.blocks.feed_forward.up.kernel):
        weight[...] = 1.1 * weight[...]
    checkpoints.save(tmp_path / "out", decoder, like=TINY / name, max_shard_bytes=shard)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > (shard < 10**9)
    made = theirs(loaded(tmp_path / "out"), tokens())
    scale = np.abs(made).max()
    np.testing.assert_allclose(ours(decoder, tokens()), made, atol=1e-4 * scale)


def test_saved_adapter_loads_to_same_logits(tmp_path):
    source = TINY / "qwen3"
    decoder = checkpoints.load(
        source, dtype="float32", param_dtype="float32", adapter=source / "adapter"
    )
    adapter = decoder.blocks.attention.query.lora_b
    adapter[...] = 1.5 * adapter[...]
    checkpoints.save_adapter(tmp_path / "adapter", decoder, base=str(source))
    model = peft.PeftModel.from_pretrained(loaded(source), tmp_path / "adapter")
    made = theirs(model, tokens())
    scale = np.abs(made).max()
    np.testing.assert_allclose(ours(decoder, tokens()), made, atol=1e-4 * scale)


@pytest.mark.parametrize("name", KNOWN)
def test_saved_random_weights_load_in_transformers(name, tmp_path):
    decoder = decoders.drawn(SMALL.replaced(KNOWN[name]))
    text = checkpoints.Text(texts.tokenizer(), "<s>", "</s>", "<pad>")
    checkpoints.save_new(tmp_path / "out", decoder, text=text, max_positions=64)
    expected = theirs(loaded(tmp_path / "out"), tokens())
    scale = np.abs(expected).max()
    np.testing.assert_allclose(ours(decoder, tokens()), expected, atol=1e-5 * scale)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("abc").input_ids == [1, 3, 4, 5] and tokenizer.eos_token_id == 2
