"""A run from its configuration to the finished student, read from top to bottom."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wandistill import teacher as placement
from wandistill.config import TrainConfig, parse_resolution
from wandistill.data.embeddings import free_memory
from wandistill.data.prepare import TrainingData, prepare_data
from wandistill.data.source import read_source
from wandistill.errors import PeerLost, WandistillError
from wandistill.evaluate.report import write_report
from wandistill.launch import lock, records
from wandistill.launch.memory import resident_bytes
from wandistill.launch.state import replans
from wandistill.models.export import clear_killed, export_student
from wandistill.models.student import ProbeBatch, Student, build_student, choose_init, empty_student, importance_of
from wandistill.planner.outcome import CACHES, planned_rank
from wandistill.planner.quantization import BATCHES
from wandistill.teacher.base import Expert, Request
from wandistill.teacher.quantize import check_quantization, quantization_error
from wandistill.train import checkpoint, distributed
from wandistill.train.batches import Sampler
from wandistill.train.distributed import World
from wandistill.train.loop import Loop
from wandistill.train.memory import MemoryAccount
from wandistill.train.objectives import Objective, build_objective
from wandistill.train.placed_teacher import PlacedTeacher
from wandistill.train.placing import Settled, settle
from wandistill.train.progress import Progress
from wandistill.train.rank_snapshot import RankReporter, report_rank
from wandistill.train.record import MetricsLog, RunRecord, versions
from wandistill.train.samples import SampleDrawer
from wandistill.train.serving import Lead, serve
from wandistill.train.setup import Setup, divide, resolve, set_precision, tell_notes, with_replans
from wandistill.train.student import TrainedStudent
from wandistill.train.trackers import Tracker

_log = logging.getLogger(__name__)


def train(config: TrainConfig) -> None:
    """Trains, or continues, or finds the run finished.

    Raises:
        WandistillError: with the exit code and the sentence for the user.
    """
    with distributed.joined(config) as (world, alarm), ExitStack() as held:
        config = with_replans(config, world)
        setup = resolve(config, world)
        set_precision(setup)
        name = lock.RUN if records.folder() is None else lock.RANKS
        _on_main(world, lambda: held.enter_context(lock.held(setup.output_dir, "wandistill train", name)))
        record = RunRecord(setup.output_dir, _identity(setup))
        if _on_main(world, lambda: record.open(config.resume)):
            _log.info(f"{setup.output_dir}: this run is finished; its student is in {setup.output_dir / 'student'}.")
            return
        last = _on_main(world, lambda: _last_step(setup, record))
        if last is not None:
            if world.is_main:
                _export_left(setup, record, last)
            return
        with report_rank(setup.config, world) as reporter:
            settled = settle(setup.config, setup.folder, setup.spec, world)
            setup = divide(dataclasses.replace(setup, config=settled.config))
            alarm.plan(settled.question(setup.folder))
            _describe(setup, config.teacher_device_strategy, settled, reporter)
            if not setup.world.takes_part:
                with reporter.during("train"):
                    serve(lambda: placement.place(setup.placement))
                return
            tell_notes(setup)
            divided = setup.world is not setup.job
            teacher = PlacedTeacher(setup.placement, reporter, Lead() if divided and setup.world.is_main else None)
            account = MemoryAccount(setup.world, settled.decision, detailed=config.memory_profile, on_phase=alarm.enter)
            try:
                with account as memory:
                    _train(setup, settled, memory, teacher, reporter)
                teacher.end()
            except BaseException as error:
                # A rank that fails alone closes nothing: its peers wait for it, and so would its teacher for them.
                if world.size == 1 or isinstance(error, distributed.SHARED):
                    teacher.release()
                if isinstance(error, WandistillError) and not isinstance(error, PeerLost):
                    teacher.end(error)
                raise


def _identity(setup: Setup) -> dict[str, Any]:
    """What a continued run must share, as far as it is known before it is settled which ranks train."""
    return {**setup.config.identity(), "student": setup.spec.to_config()}


def _global_batch(setup: Setup) -> int:
    """Samples of an optimizer step."""
    return setup.config.batch_size * setup.config.gradient_accumulation_steps * setup.world.size


def _describe(setup: Setup, asked: str, settled: Settled, reporter: RankReporter) -> None:
    """Tells the metrics what this run is."""
    config, found = setup.config, versions()
    reporter.describe(
        "wandistill_build_info", **{"version": found["wandistill"], "torch": found["torch"], "python": found["python"]}
    )
    reporter.describe(
        "wandistill_config_info",
        teacher=config.teacher_path,
        student=config.student_config,
        teacher_dtype=config.teacher_dtype,
        resolution=config.resolution,
        world_size=setup.job.size,
    )
    reporter.describe("wandistill_placement_info", asked=asked, resolved=config.teacher_device_strategy)
    planned = planned_rank(settled.decision, setup.job.rank)
    if planned is not None and setup.world.device.type == "cuda":
        reporter.predict(planned)


def _train(
    setup: Setup, settled: Settled, memory: MemoryAccount, teacher: PlacedTeacher, reporter: RankReporter
) -> None:
    config, folder, spec, world = setup.config, setup.folder, setup.spec, setup.world
    record = RunRecord(setup.output_dir, {**_identity(setup), "global_batch": _global_batch(setup)})
    _on_main(world, lambda: record.open(config.resume))
    if world.is_main:
        record.update(config=dataclasses.asdict(config), **settled.to_json())
    root = setup.output_dir / "checkpoints"
    found, notes = _on_main(world, lambda: checkpoint.choose(root, config.resume))
    for note in notes:
        _log.warning(note)

    with memory.phase(CACHES), reporter.during("prepare"):
        data = prepare_data(config, folder, teacher.get, world, settled.prompt_cost())
        # A teacher may have computed them on a stream of its own, for which torch would keep their memory.
        free_memory(world.device)
    objective = build_objective(config.objective, config.feature_weight, spec.blocks)
    total_samples, total_steps = _length(setup, len(data))
    sampler = Sampler(
        config, world, data, total_samples=total_samples, boundary=folder.boundary, shift=config.flow_shift
    )
    sections: dict[str, Any] = {}
    pairs = list(zip(objective.student_blocks, objective.teacher_blocks, strict=True))
    if found is None:
        if config.teacher_dtype in placement.QUANTIZED:
            with memory.phase("quantization"):
                sections |= _quantization(setup, teacher, sampler)
        with memory.phase("building"), reporter.during("load"):
            student, more = _first_student(setup, teacher, sampler, pairs)
        sections |= more
    else:
        student = empty_student(folder, spec, feature_pairs=pairs)
    if config.targets == "cached":
        teacher.release()

    trained = TrainedStudent(student, config, world)
    first = 0
    if found is not None:
        state = trained.state()
        trainer = checkpoint.load(found, state, world)
        trained.load_state(state, trainer)
        first = trainer["step"]
        _log.info(f"continuing from {found}")
    if world.is_main:
        sections["replans"] = replans(setup.output_dir)
        record.begin(setup.job.size, **_sections(setup, trained, total_steps, len(data)), **sections)
    with reporter.during("train"):
        _run_loop(setup, trained, teacher, data, sampler, objective, first, total_steps, record, memory, reporter)
    teacher.release()
    with reporter.during("export"):
        weights = trained.full_weights()
        if world.is_main:
            _export(setup, record, weights, total_steps, data.sample_prompts[0])


def _length(setup: Setup, items: int) -> tuple[int, int]:
    """Samples and optimizer steps of the whole run."""
    config = setup.config
    batch = _global_batch(setup)
    if config.max_steps:
        return config.max_steps * batch, config.max_steps
    samples = config.num_epochs * items
    return samples, math.ceil(samples / batch)


def _probe_requests(setup: Setup, sampler: Sampler) -> list[Request]:
    """A few requests of the kind that the run will make, spread over the experts."""
    config, folder = setup.config, setup.folder
    return [
        Request(
            batch.x,
            batch.t,
            batch.prompt,
            expert,
            config.guidance_scale if expert is folder.experts[0] else config.guidance_low,
            (),
        )
        for expert, batch in sampler.probes(BATCHES)
    ]


def _quantization(setup: Setup, teacher: PlacedTeacher, sampler: Sampler) -> dict[str, Any]:
    """Measures what 8-bit storage does to the targets, against bfloat16 weights read from disk block by block.

    Raises:
        ConfigError: more than the limit, without --force.
    """
    config = setup.config
    # A rank that only computes the teacher is not there to do its share of a node's work.
    world = setup.job if setup.world is setup.job else setup.world.alone()
    reference = placement.BUILDERS["disk"](placement.Setting(config, setup.folder, torch.bfloat16, world))
    errors = quantization_error(teacher.get(), reference, _probe_requests(setup, sampler))
    reference.close()
    if setup.world.is_main:
        told = ", ".join(f"{expert.value} {error:.2%}" for expert, error in errors.items())
        _log.info(f"--teacher_dtype {config.teacher_dtype}: relative L2 error of the targets against bfloat16: {told}")
    check_quantization(errors, config.teacher_dtype, allow=config.force)
    return {"quantization_error": {expert.value: error for expert, error in errors.items()}}


def _first_student(
    setup: Setup, teacher: PlacedTeacher, sampler: Sampler, pairs: list[tuple[int, int]]
) -> tuple[Student, dict[str, Any]]:
    """The student as training starts, on rank 0; empty elsewhere, to be filled from there."""
    config, folder, spec, world = setup.config, setup.folder, setup.spec, setup.world
    init = config.init
    narrow = spec.narrower_than(folder.architecture)
    batches: list[ProbeBatch] = []
    if config.targets == "online":
        teacher.get()  # which steps will ask; where it has its weights in memory, they need not be read for the student
    if init == "auto" or (narrow and init != "random"):
        placed = teacher.get()
        for ask in _probe_requests(setup, sampler):
            answer = placed.result(placed.request(ask.x, ask.t, ask.prompt, ask.expert, ask.guidance))
            batches.append(ProbeBatch(ask.x, ask.t, ask.prompt.positive, answer.velocity))
        # What follows loads experts and candidates on this device, where the teacher may fill the memory.
        teacher.release()

    def build() -> tuple[Student, dict[str, Any]]:
        chosen, sections = init, {}
        candidates = ("low", "average", "high") if init == "auto" else (init,)
        importances = {
            name: importance_of(folder, spec, name, batches, dtype=setup.compute_dtype, device=world.device)
            for name in candidates
        }
        if init == "auto":
            chosen, errors = choose_init(folder, spec, batches, importances=importances, device=world.device)
            sections["init"] = {"chosen": chosen, "velocity_errors": errors}
            _log.info(f"--init auto: {chosen} is nearest to the teacher {errors}")
        student = build_student(
            folder,
            spec,
            chosen,
            feature_pairs=pairs,
            importance=importances[chosen],
            seed=config.seed,
            placed=teacher.placed,
        )
        return student, sections

    outcome = _catch(build) if world.is_main else (empty_student(folder, spec, feature_pairs=pairs), {})
    error = world.broadcast(outcome if isinstance(outcome, WandistillError) else None)
    if error is not None:
        raise error
    assert isinstance(outcome, tuple)
    return outcome


def _run_loop(
    setup: Setup,
    trained: TrainedStudent,
    teacher: PlacedTeacher,
    data: TrainingData,
    sampler: Sampler,
    objective: Objective,
    first: int,
    total: int,
    record: RunRecord,
    memory: MemoryAccount,
    reporter: RankReporter,
) -> None:
    config, world = setup.config, setup.world
    root = setup.output_dir / "checkpoints"
    log = MetricsLog(setup.output_dir / "metrics.jsonl", first) if world.is_main else None
    tracker = Tracker(config, setup.output_dir, enabled=world.is_main)
    drawer = SampleDrawer(config, setup.folder, data, world) if config.save_samples else None
    sample_interval = config.sample_interval or max(total // 4, 1)
    progress = Progress("training", total, start=first, enabled=world.is_main)

    def on_step(step: int, figures: dict[str, float], expert: Expert) -> None:
        reporter.add_step(step, figures, expert)
        used = {"gpu_peak_bytes": memory.gpu_peak(), "host_rss_bytes": resident_bytes()}
        memory.step(figures["step_seconds"])
        if log is not None:
            log.write(step, {**figures, **used})
        tracker.log(step, figures)
        rate = sampler.global_batch / max(figures["step_seconds"], 1e-9)
        progress.update(
            text=f"loss {figures['loss']:.4f} {rate:.1f} samples/s teacher {figures['teacher_seconds'] * 1e3:.0f} ms "
            f"student {figures['student_seconds'] * 1e3:.0f} ms {max(used.values()) / 2**30:.1f} GiB",
            figures=lambda: {"loss": figures["loss"], **memory.beside_plan()},
        )

    def is_pause(step: int) -> bool:
        return step == total or step % config.checkpoint_interval == 0 or step % sample_interval == 0

    def on_pause(step: int, stopped: bool) -> None:
        if drawer is not None and (step == total or step % sample_interval == 0):
            with memory.phase("samples"), reporter.during("sample"):
                drawer.draw(trained, step)
        if stopped or step == total or step % config.checkpoint_interval == 0:
            began = time.monotonic()
            with reporter.during("checkpoint"):
                path = checkpoint.save(
                    root, step, trained.state(), trained.trainer_state(), world, config.keep_checkpoints
                )
            if world.is_main:
                reporter.add_checkpoint(path, time.monotonic() - began)
            memory.write(record, trained)
        reporter.end_pause()

    loop = Loop(
        config,
        world,
        trained,
        teacher.get() if config.targets == "online" and first < total else None,
        sampler,
        objective,
        total_steps=total,
        on_step=on_step,
        on_nonfinite=reporter.add_nonfinite,
        is_pause=is_pause,
        on_pause=on_pause,
        on_begin=reporter.begin_step,
        phase=memory.phase,
        signal_elsewhere=teacher.lead.stop_signal if teacher.lead is not None else lambda: None,
    )
    try:
        with progress:
            reporter.begin_steps(first, total, config.checkpoint_interval, trained.watch_gradients)
            loop.run(first)
    finally:
        tracker.close()
        if log is not None:
            log.close()


def _last_step(setup: Setup, record: RunRecord) -> Path | None:
    """The checkpoint of the last step, where every step has been taken and only the export is missing."""
    if not record.steps or setup.config.resume not in ("auto", "latest"):
        return None
    found, _ = checkpoint.choose(setup.output_dir / "checkpoints", "auto")
    return found if found is not None and checkpoint.step_of(found) == record.steps else None


def _export_left(setup: Setup, record: RunRecord, last: Path) -> None:
    """Exports from the last step's checkpoint, on one rank: the others' nodes may have left long ago."""
    config = setup.config
    _log.info(f"{last}: every step has been taken; exporting the student.")
    weights = checkpoint.load_student_weights(last, average=config.averages)
    prompt = read_source(config).sample_prompts[0]
    _export(setup, record, weights, record.steps, prompt)


def _export(setup: Setup, record: RunRecord, weights: dict[str, Tensor], step: int, example_prompt: str) -> None:
    """Writes student and report, and notes that the run is finished; on rank 0, which nothing waits for."""
    config, folder, destination = setup.config, setup.folder, setup.output_dir / "student"
    clear_killed(destination)
    export_student(
        empty_student(folder, setup.spec).transformer,
        folder,
        destination,
        resolution=parse_resolution(config.resolution),
        steps=config.sample_steps,
        shift=config.flow_shift,
        weights=weights,
        details={"steps": step, "seed": config.seed, "blocks": list(setup.spec.blocks)},
        example_prompt=example_prompt,
    )
    record.end_try("finished", step)
    write_report(setup.output_dir)
    _log.info(
        f"the student is in {destination}, the report is {setup.output_dir / 'report.html'}; "
        f"'wandistill evaluate {setup.output_dir}' compares it with the teacher."
    )


def _sections(setup: Setup, trained: TrainedStudent, total_steps: int, items: int) -> dict[str, Any]:
    """The parts of run.json that describe teacher, student and schedule."""
    folder, spec = setup.folder, setup.spec
    return {
        "teacher": {
            "path": setup.config.teacher_path,
            "experts": [expert.value for expert in folder.experts],
            "boundary": folder.boundary,
            "parameters": folder.architecture.parameters * len(folder.experts),
            "fingerprint": folder.fingerprint(*(expert.value for expert in folder.experts)),
        },
        "student": {
            "config": spec.to_config(),
            "parameters": spec.architecture.parameters,
            "blocks": list(spec.blocks),
        },
        "steps": total_steps,
        "items": items,
    }


def _on_main(world: World, function: Any) -> Any:
    """Rank 0's result of `function` on every rank; its error is every rank's error."""
    outcome = world.broadcast(_catch(function) if world.is_main else None)
    if isinstance(outcome, WandistillError):
        raise outcome
    return outcome


def _catch(function: Any) -> Any:
    try:
        return function()
    except WandistillError as error:
        return error
