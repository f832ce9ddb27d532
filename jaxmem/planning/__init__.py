"""Plans: what programs take of devices that are not there, by XLA's compilers.

print(jaxmem.plan(step, *shapes, device="h200"))       # one's own train step
jaxmem plan CONFIG.gin --device h200 --devices 2       # a job's programs
"""

from jaxmem.planning.plans import Plan as Plan, plan as plan
