"""torchrun, which also tells `wandistill launch` by which code or signal each rank ended; by itself it returns 1."""

import ctypes
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from wandistill.launch import records

# prctl(2): the signal that this process gets when its parent dies. Ranks without a launcher would go on beside those of
# the next one.
_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        main(sys.argv[1:])
    except ChildFailedError as error:
        records.leave_failures(
            {rank: (failure.exitcode, failure.timestamp) for rank, failure in error.failures.items()}
        )
        sys.exit(1)
