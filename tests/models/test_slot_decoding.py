"""Rows that take slots one after the other, and go on after they are read again."""

import jax
import numpy as np
import pytest

from jaxmem.models.sampling import Sampler, SamplingConfig, prepared, row_keys
from jaxmem.models.slot_decoding import NewRow, SlotSampler
from tests.helpers.cases import slow
from tests.helpers.sampling import (
    EOS,
    LAYERS_OF_ATTENTION,
    LENGTHS,
    LONG,
    OTHER_PARTS,
    PAD,
    PROMPTS,
    decoder,
    run,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEW = 12
LONGEST = 4 + NEW - 1  # the last token is not read


class Host:
    """The caller of a `SlotSampler`, with rows of the tests' prompts."""

    def __init__(self, model, slots, part, settings):
        self.temperature = np.float32(settings.get("temperature", 1.0))
        settings = settings | {"temperature": 1.0}
        config = SamplingConfig(max_new_tokens=NEW, **settings)
        sampler = Sampler(config, (EOS,), PAD)
        self.records = model.config.experts.count is not None
        room = LONGEST + part * self.records  # nothing is lost after a row's end
        made = SlotSampler(sampler, slots, room, part, 2, self.records)
        self.decoder = prepared(model)
        self.read, self.routes_of = jax.jit(made.read), jax.jit(made.routes)
        self.place, self.advance = jax.jit(made.place), jax.jit(made.advance)
        self.state = jax.jit(made.empty)(self.decoder)
        self.rows = [None] * slots
        self.tokens = [[] for _ in PROMPTS]
        self.logprobs = [[] for _ in PROMPTS]
        self.best = [[] for _ in PROMPTS]
        self.routes = [None for _ in PROMPTS]

    def start(self, row):
        slot = self.rows.index(None)
        ids = [*PROMPTS[row, : LENGTHS[row]], *self.tokens[row]]
        padded = np.zeros((1, LONGEST), np.int32)
        padded[0, : len(ids)] = ids
        lengths = np.array([len(ids)], np.int32)
        key = row_keys(jax.random.key(18), np.arange(5))[row]
        counts = np.int32(len(self.tokens[row])), np.int32(NEW)
        new = NewRow(np.int32(slot), key, *counts, self.temperature)
        prompt = self.read(self.decoder, padded, lengths)
        self.state, drawn = self.place(self.decoder, self.state, prompt, new)
        self.rows[slot] = row
        self._add(drawn, [slot])

    def step(self):
        self.state, drawn = self.advance(self.decoder, self.state)
        self._add(drawn, range(len(self.rows)))

    def take_out(self):
        """Free all slots; the rows that were in them."""
        rows = [row for row in self.rows if row is not None]
        self.state = self.state._replace(ended=np.ones(len(self.rows), bool))
        self.rows = [None] * len(self.rows)
        return rows

    def _add(self, drawn, slots):
        for column, slot in enumerate(slots):
            row = self.rows[slot]
            if row is None:
                continue
            mask = np.asarray(drawn.drawn.mask)[:, column]
            for kept, new in (
                (self.tokens, drawn.drawn.tokens),
                (self.logprobs, drawn.drawn.logprobs),
                (self.best, drawn.top_logprobs),
            ):
                kept[row] += np.asarray(new)[mask, column].tolist()
            if drawn.ended[column]:
                self.rows[slot] = None
                if self.records:
                    self.routes[row] = np.asarray(self.routes_of(self.state, slot))


@pytest.mark.full
@pytest.mark.parametrize(
    ("slots", "part", "changes", "settings"),
    [
        (2, 3, {}, dict(top_p=0.7, support=7)),
        slow(1, 5, LONG, {}),
        slow(3, 2, LAYERS_OF_ATTENTION | {"embedding.positions": 16}, dict(top_k=5)),
        slow(2, 4, OTHER_PARTS, dict(temperature=0.7)),
    ],
)
def test_row_tokens_are_those_of_the_sampler(slots, part, changes, settings):
    model = decoder(**changes)
    expected = run(model, seed=18, **settings)
    host, waiting, parts = Host(model, slots, part, settings), [0, 1, 2, 3, 4], 0
    while waiting or any(row is not None for row in host.rows):
        while waiting and None in host.rows:
            host.start(waiting.pop(0))
        host.step()
        parts += 1
        if parts % 2 == 0:  # rows go on in other slots, after they are read again
            waiting = host.take_out()[::-1] + waiting
    for row, mask in enumerate(expected.mask):
        assert host.tokens[row] == expected.tokens[row][mask].tolist()
        np.testing.assert_allclose(
            host.logprobs[row], expected.logprobs[row][mask], atol=1e-5
        )
        if host.records:
            read = LENGTHS[row] + len(host.tokens[row]) - 1
            routes = host.routes[row][:read], expected.routes[row][:read]
            np.testing.assert_array_equal(*routes)
            assert len({x.tobytes() for x in routes[0]}) > 1
        best = np.array(host.best[row])
        assert (best[:, 0] >= best[:, 1]).all()
        assert (best[:, 0] + 1e-5 >= host.logprobs[row]).all()
    assert len(set(expected.lengths)) > 2 and expected.lengths.max() == NEW
