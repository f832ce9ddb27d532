"""Serves a model over HTTP, by the routes of vLLM: `jaxmem serve`.

Completions come from the sampler that training uses, so their log-probabilities are
those of the trainer. `http_server` has the routes, `decoding_loop` the thread that owns
the device, and `served_weights` what new weights replace.
"""
