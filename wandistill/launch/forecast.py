"""Whether a run cannot fit, told before torch is imported. No torch.

A run measures its machine and then decides (`wandistill.train.placing.settle`), which takes seconds that a refusal need
not wait for. So what is refused here is refused there: whatever a run measures counts here with the value that favours
it most, and where something is not known nothing is said. All ranks of a node come to the same answer, since they look
at the same GPUs.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandistill.catalog import Model, find_gpu, model_from_folder, models
from wandistill.config import TrainConfig, with_defaults
from wandistill.errors import ConfigError, DoesNotFit
from wandistill.launch import records, state
from wandistill.launch.driver import ask_nvml, check_driver, nvml_text, torch_cuda
from wandistill.launch.memory import available_bytes, whole_bytes
from wandistill.launch.node import is_rank
from wandistill.planner.decide import decide
from wandistill.planner.from_config import request_of_config
from wandistill.planner.measured import room_on_gpu
from wandistill.planner.placements import Placement
from wandistill.planner.request import Machines
from wandistill.student_config import student_spec

# Seconds between two looks at GPUs on which a run does not fit.
_AGAIN_SECONDS = 2.0


@dataclass(frozen=True)
class Card:
    """A GPU as NVML has it. Bytes."""

    name: str
    uuid: str
    total: int
    free: int  # that no process holds


def check_job(config: TrainConfig) -> None:
    """`check_fit` of the job that torchrun started this process for, or of this process alone.

    Nothing is said below a launcher, which has looked before it started its ranks; nor where torch is imported already:
    no time is to be gained then, and what this process holds of a GPU is no other's.

    Raises:
        DoesNotFit: see `check_fit`.
    """
    if records.folder() is not None or "torch" in sys.modules:
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_fit(config, ranks, -(-int(os.environ["WORLD_SIZE"]) // ranks) if is_rank() else 1)


def check_fit(config: TrainConfig, ranks: int, nodes: int) -> None:
    """Refuses a run that cannot fit on this node's GPUs.

    Args:
        ranks: on this node.
        nodes: of the job; of several, the others' GPUs are not known.

    Raises:
        DoesNotFit: with the planner's sentence and what would make it fit.
    """
    model = _model(config) if nodes == 1 and torch_cuda() is not None and _judges(config) else None
    if model is None:
        return
    found = _refusal(config, model, ranks)
    if found:
        # A process that is being killed, such as one of the try before, gives its memory back a moment later.
        time.sleep(_AGAIN_SECONDS)
        found = _refusal(config, model, ranks)
    if found:
        raise found


def _refusal(config: TrainConfig, model: Model, ranks: int) -> DoesNotFit | None:
    """Why the run cannot fit on the GPUs as they are now."""
    cards = _cards_of(ranks, ask_nvml(_all_cards) or [])
    if not cards:
        return None
    try:
        _decide(config, model, cards)
    except DoesNotFit as error:
        return error
    except ConfigError:  # the run comes upon it too, and tells it in its turn
        pass
    return None


def _judges(config: TrainConfig) -> bool:
    """Whether this run is to be decided anew, by what is known before it starts."""
    output = Path(config.output_dir)
    mapped = config.teacher_device_strategy == Placement.CUSTOM.value or config.teacher_device_map
    replanned = config.on_oom == "replan" and state.replans(output)
    return not (
        config.device == "cpu"
        or config.force
        or config.targets == "cached"
        or mapped
        or replanned
        or state.all_steps_taken(output)
    )


def _model(config: TrainConfig) -> Model | None:
    """The teacher where it is known without the hub: a local folder's, or the catalogue's of a hub id."""
    folder = Path(config.teacher_path).expanduser()
    found = None
    if folder.is_dir():
        try:
            found = model_from_folder(folder)
        except ConfigError:  # opening it says better what is wrong with it
            return None
    elif not config.teacher_revision:
        found = next((model for model in models().values() if config.teacher_path in model.repositories), None)
    return found and dataclasses.replace(found, name=config.teacher_path, title=config.teacher_path)


def _decide(config: TrainConfig, model: Model, cards: list[Card]) -> None:
    """Asks the planner, at the catalogue's speeds.

    Raises:
        DoesNotFit: the run cannot fit.
        ConfigError: a GPU that is not in the catalogue, a driver too old for torch, or settings that cannot be.
    """
    check_driver()
    student = student_spec(config.student_config, model.architecture)
    config = with_defaults(config, student, device="cuda", flow_shift=model.flow_shift)
    now = Machines(
        gpu=find_gpu(cards[0].name),
        ranks=len(cards),
        nodes=1,
        host_memory=available_bytes(),
        cores=len(os.sched_getaffinity(0)),
        # A rank that was quicker than this one may have its CUDA context already: it counts as free.
        gpu_memory=min(min(room_on_gpu(card.free, 0, len(cards)), card.total) for card in cards),
        half_cores=True,
    )
    # As if neither the driver nor a process took anything, and all that runs beside the ranks ended.
    best = dataclasses.replace(now, host_memory=whole_bytes(), context=0, process=0)
    request = request_of_config(config, model, student, best)
    if decide(request, force=True).forced:
        # Told with what there is now, for which the advice is meant.
        decide(request.change(machines=now))


def _all_cards(nvml: Any) -> list[Card]:
    """All of this machine's, by their numbers; none where MIG divides one, whose parts are numbered otherwise."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    if any(_divided(nvml, handle) for handle in handles):
        return []
    cards = []
    for handle in handles:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
        cards.append(Card(nvml_text(name), nvml_text(uuid), int(memory.total), int(memory.free)))
    return cards


def _divided(nvml: Any, handle: Any) -> bool:
    try:
        return nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_DISABLE
    except nvml.NVMLError_NotSupported:
        return False


def _cards_of(ranks: int, cards: list[Card]) -> list[Card]:
    """Those that the node's ranks use, in CUDA's order; none where that is not sure, or there are fewer than ranks."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = [str(number) for number in range(len(cards))] if visible is None else visible.split(",")
    by_number = any(entry.strip().isdigit() for entry in entries)
    # NVML counts along the bus, and CUDA too where all cards are alike; else the fastest comes first.
    alike = len({card.name for card in cards}) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if by_number and not alike:
        return []
    chosen = []
    for entry in map(str.strip, entries):
        found = [card for number, card in enumerate(cards) if _names(entry, number, card)]
        if len(found) != 1 or found[0] in chosen:
            return []
        chosen += found
    return chosen[:ranks] if len(chosen) >= ranks else []


def _names(entry: str, number: int, card: Card) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES means `card`: its number, or the beginning of its UUID."""
    return entry == str(number) or (entry.startswith("GPU-") and card.uuid.startswith(entry))
