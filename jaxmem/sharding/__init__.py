"""Runs the verbs over a mesh of devices: global arrays in, global arrays out."""

from jaxmem.base import imports
from jaxmem.sharding.parallel import parallel as parallel

__dir__ = imports.public_dir(__name__)
