"""Plans: the memory and time of programs on absent devices, by XLA's compilers.

print(jaxmem.plan(step, *shapes, device="h200"))       # one's own train step
jaxmem plan CONFIG.gin --device h200 --devices 2       # a job's programs
"""

import typing

from jaxmem.base import imports

if typing.TYPE_CHECKING:
    from jaxmem.planning.plans import Plan as Plan, plan as plan
else:  # at first use: the command line imports this package for its arguments
    __getattr__, __dir__ = imports.lazy(__name__, Plan="plans", plan="plans")
