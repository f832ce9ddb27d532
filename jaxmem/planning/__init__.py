"""Plans: the memory and time of programs on absent devices, by XLA's compilers.

print(jaxmem.plan(step, *shapes, device="h200"))       # one's own train step
jaxmem plan CONFIG.gin --device h200 --devices 2       # a job's programs
"""

from jaxmem.planning.plans import Plan as Plan, plan as plan
