"""`python -m jaxmem` is `jaxmem`."""

import sys

from jaxmem.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
