"""What a rank tells the metrics endpoint: its phase, steps and memory, written by a thread every second."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from wandistill.config import TrainConfig
from wandistill.errors import ConfigError
from wandistill.metrics import snapshot
from wandistill.metrics.names import EXPERTS, PHASES
from wandistill.metrics.pod import PodState, serve
from wandistill.metrics.predicted import predicted_samples
from wandistill.metrics.snapshot import Sample
from wandistill.metrics.steps import StepStatistics, wall_time
from wandistill.planner.terms import Phases
from wandistill.teacher.base import Expert
from wandistill.teacher.copy_stream import Copied
from wandistill.train.distributed import World
from wandistill.train.rank_memory import HostMemory, gpu_memory

_log = logging.getLogger(__name__)

INTERVAL = 1.0
_LAST_SECONDS = 5.0


class RankReporter:
    """Keeps what a rank tells, and while its context lasts writes it as a snapshot into `folder`.

    Without a folder nothing is written and no thread runs; the calls are the same.

    Args:
        folder: of this node's ranks.
        interval: seconds between snapshots.
    """

    def __init__(self, world: World, folder: Path | None, *, interval: float = INTERVAL) -> None:
        self._world, self._folder, self._interval = world, folder, interval
        self._snapshot = snapshot.mine(world.rank, world.local_rank, world.node)
        self._phase = "start"
        self._predicted: dict[str, list[Sample]] = {}
        self._facts: dict[str, list[Sample]] = {}
        self._steps: StepStatistics | None = None
        self._checkpoint: dict[str, list[Sample]] = {}
        self._saved = 0.0  # when, by the monotonic clock; when training began, before the first
        self._host = HostMemory()
        self._gpu = gpu_memory(world.device) if folder else None
        self._next_look = 0.0
        self._changed = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed = False

    def __enter__(self) -> RankReporter:
        if self._folder is not None:
            self._write()
            self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            # A driver that hangs must not keep the rank from its end.
            self._thread.join(timeout=_LAST_SECONDS)
            if not self._thread.is_alive():
                self._write()

    @property
    def phase(self) -> str:
        """What the rank is doing, of `PHASES`."""
        return self._phase

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The body is `phase`; after it the rank does again what it did before.

        After an error the phase stays, so that a report of the error names it.
        """
        assert phase in PHASES
        before, self._phase = self._phase, phase
        self._begin_work()
        yield
        self._phase = before
        self._begin_work()

    def describe(self, name: str, **labels: object) -> None:
        """A fact of the run, such as its placement: an `_info` metric."""
        with self._changed:
            self._facts[name] = [({key: str(value) for key, value in labels.items()}, 1)]

    def predict(self, planned: Phases) -> None:
        """What the plan says of the rank's GPU."""
        self._predicted = predicted_samples(planned)

    def begin_steps(
        self,
        first: int,
        total: int,
        checkpoint_interval: int,
        watch_gradients: Callable[[], Callable[[], int]] | None = None,
    ) -> None:
        """Training goes on after `first` of `total` steps.

        Args:
            watch_gradients: `TrainedStudent.watch_gradients`, which costs some time in each step.
        """
        if self._gpu is not None and watch_gradients is not None:
            self._gpu.terms.gradients = watch_gradients()
        with self._changed:
            self._steps = StepStatistics(total)
            self._steps.begin(first)
            self._facts["wandistill_checkpoint_interval_steps"] = [({}, checkpoint_interval)]
            self._checkpoint, self._saved = {}, time.monotonic()

    def begin_step(self, left: object) -> None:
        """A step begins; where the GPU's memory stands then is looked at once for each snapshot.

        Args:
            left: by earlier steps for later ones, see `MeasuredTerms.begin`.
        """
        if self._gpu is not None and time.monotonic() >= self._next_look:
            self._gpu.terms.begin(left)
            self._next_look = time.monotonic() + self._interval

    def _begin_work(self) -> None:
        if self._gpu is not None:
            self._gpu.terms.begin()
            self._next_look = 0.0

    def add_step(self, step: int, figures: dict[str, float], expert: Expert) -> None:
        """A step ended, see `StepStatistics.add`."""
        assert self._steps is not None
        with self._changed:
            self._steps.add(step, figures, EXPERTS[expert is Expert.LOW])

    def add_nonfinite(self) -> None:
        """A step's target or loss was not finite."""
        assert self._steps is not None
        with self._changed:
            self._steps.add_nonfinite()

    def end_pause(self) -> None:
        """Checkpoint or samples are done; the next step's pace counts from here."""
        assert self._steps is not None
        with self._changed:
            self._steps.resume()

    def add_checkpoint(self, path: Path, seconds: float) -> None:
        """A checkpoint is whole."""
        files = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["files"]
        with self._changed:
            self._checkpoint = {
                "wandistill_checkpoint_seconds": [({}, seconds)],
                "wandistill_checkpoint_bytes": [({}, sum(files.values()))],
            }
            self._saved = time.monotonic()

    def _work(self) -> None:
        while not self._stop.wait(self._interval):
            self._write()

    def _write(self) -> None:
        assert self._folder is not None
        try:
            self._snapshot.samples = self._samples()
            snapshot.write(self._folder, self._snapshot)
        # Training goes on without its figures; a driver reports a lost GPU by errors of its own.
        except Exception as error:
            if not self._failed:
                _log.warning(f"note: rank {self._world.rank} tells no metrics for now: {error}")
            self._failed = True
        else:
            self._failed = False

    def _samples(self) -> dict[str, list[Sample]]:
        found: dict[str, Any] = dict(self._host.samples())
        if self._gpu is not None:
            found |= self._gpu.samples() | self._predicted
        with self._changed:
            found["wandistill_rank_phase"] = [({"phase": name}, int(name == self._phase)) for name in PHASES]
            found["wandistill_rank_link_bytes_total"] = [({}, Copied.size)]
            if self._steps is not None:
                found |= self._steps.samples()
            if self._world.is_main:
                found |= self._facts | self._checkpoint
                if self._steps is not None:
                    found |= self._steps.run_samples()
                    saved = round(wall_time(self._saved), 3)
                    found["wandistill_checkpoint_timestamp_seconds"] = [({}, saved)]
        return found


@contextlib.contextmanager
def report_rank(config: TrainConfig, world: World) -> Iterator[RankReporter]:
    """A reporter for the body's time; where no supervisor serves the node's metrics, its first rank does.

    Raises:
        ConfigError: `--metrics_port` cannot be listened on.
    """
    output_dir = Path(config.output_dir).resolve()
    given = os.environ.get("WANDISTILL_METRICS_DIR", "")
    serves = bool(config.metrics_port) and not given
    folder = Path(given) if given else _node_folder(output_dir) if serves else None
    with contextlib.ExitStack() as stack:
        if serves and folder is not None and world.local_rank == 0:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            run = os.environ.get("WANDISTILL_RUN") or output_dir.name
            pool = os.environ.get("WANDISTILL_POOL") or "local"
            state = PodState(run, pool, world.node)
            stack.callback(serve(state, folder, config.metrics_port).close)
        yield stack.enter_context(RankReporter(world, folder, interval=INTERVAL))


def _node_folder(output_dir: Path) -> Path:
    """A folder that the ranks of one node and one try find, and no others."""
    names = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "GROUP_RANK", "MASTER_PORT")]
    digest = hashlib.sha256("\0".join([*names, str(output_dir)]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"wandistill-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"--metrics_port: {folder} belongs to another user; set TMPDIR to a folder of your own.")
    return folder
