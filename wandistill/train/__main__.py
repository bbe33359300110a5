"""`torchrun ... -m wandistill.train FLAGS` is the same as `wandistill train FLAGS` on every rank."""

import sys

from wandistill.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
