"""jaxmem's head in other trainers: one module per trainer, imported on demand.

    from jaxmem.integrations import tunix

    tunix.apply()           # until tunix.undo(); prints what is replaced
    with tunix.applied():   # or inside a with block

Apply before the trainer compiles its steps, because compiled steps do not change. Also
apply before your own modules import a trainer's function by name: every name of the
function within the trainer's package is replaced, and restored by `undo`, but a name in
another module is not changed, and a warning lists it.

    tunix.apply(strict=True)          # an error wherever a call is not served
    print(*integrations.status())     # calls that were served, and why others were not
"""

import typing

from jaxmem.base import imports

if typing.TYPE_CHECKING:
    from jaxmem.integrations import (
        easydel as easydel,
        maxtext as maxtext,
        skyrl as skyrl,
        tunix as tunix,
    )
    from jaxmem.integrations._replace import status as status
else:
    __getattr__, __dir__ = imports.lazy(
        __name__, "easydel", "maxtext", "skyrl", "tunix", status="_replace"
    )
