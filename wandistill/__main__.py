"""`python -m wandistill` is the same as `wandistill`."""

import os
import sys

from wandistill.cli import main
from wandistill.launch import records

code = main()
if "RANK" in os.environ:  # one of torchrun's
    records.end_process(code)
sys.exit(code)
