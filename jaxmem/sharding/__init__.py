"""Runs the verbs over a mesh of devices: global arrays in, global arrays out."""

from jaxmem import _imports
from jaxmem.sharding.parallel import parallel as parallel

__dir__ = _imports.public_dir(__name__)
