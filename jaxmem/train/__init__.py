"""Supervised training; needs what `pip install 'jaxmem[train]'` brings."""
