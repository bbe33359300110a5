"""`python -m wandistill` is the same as `wandistill`."""

import sys

from wandistill.cli import main

sys.exit(main())
