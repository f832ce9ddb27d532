"""A decoder-only transformer: sizes, layers, cache, adapters, sampling."""
