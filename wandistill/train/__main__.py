"""`torchrun ... -m wandistill.train FLAGS` is the same as `wandistill train FLAGS` on every rank."""

import sys

from wandistill.cli import main
from wandistill.launch import records

records.register()
records.end_process(main(["train", *sys.argv[1:]]))
