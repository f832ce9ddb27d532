"""jaxmem's head in trainers that others wrote: one module each, imported on demand.

    from jaxmem.integrations import tunix

    tunix.apply()           # until tunix.undo(); prints what is replaced
    with tunix.applied():   # or for a while

Apply before the trainer compiles its steps: what is compiled stays as it is. Apply
before your own modules import a trainer's function by name, too: within the trainer's
package every name of it is replaced, and put back by `undo`; a name that another module
holds is left, and a warning says which.
"""

from jaxmem import _imports

__getattr__, __dir__ = _imports.lazy(__name__, "easydel", "maxtext", "skyrl", "tunix")
