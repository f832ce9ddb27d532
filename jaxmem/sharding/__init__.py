"""Runs the verbs over a mesh of devices: global arrays in, global arrays out."""

from jaxmem.sharding.parallel import parallel as parallel
