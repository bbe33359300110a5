"""The student under training: its parallelism, precision, optimizer and average, and their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from wandistill.config import TrainConfig
from wandistill.models.held import block_bytes, hold
from wandistill.models.student import Student
from wandistill.train.distributed import World
from wandistill.train.norms import norms_in_float32
from wandistill.train.optimizer import HALF_WEIGHTS, Average, build_optimizer, half_weights, local, seed_rounding


class TrainedStudent:
    """A `Student` with everything that moves it.

    accelerate carries mixed precision and the fp16 scaler. Its DDP spans the whole job and its FSDP2 GPUs only, so
    torch's are called themselves: the teacher's rank may be left out, and the tests run both on CPU ranks.

    DDP looks for unused parameters, although there are none: only then it keeps its buckets as they are. Otherwise
    it rebuilds them after the first step, so that a resumed run of three or more ranks sums in another order.
    """

    def __init__(self, student: Student, config: TrainConfig, world: World) -> None:
        self._config, self._world = config, world
        self.accelerator = Accelerator(cpu=world.device.type == "cpu", mixed_precision=config.mixed_precision)
        if config.optimizer in HALF_WEIGHTS:
            half_weights(student, WanTransformer3DModel._keep_in_fp32_modules)
        norms_in_float32(student)
        student.gradient_checkpointing = config.gradient_checkpointing
        self.module = student
        self.sharded = config.student_parallel == "fsdp" and world.size > 1
        # Parameters that FSDP leaves whole on every rank; their gradients are averaged by `accumulate`.
        self._replicated: list[nn.Parameter] = []
        if self.sharded:
            self._shard()
        else:
            _place(student, world.device)
        self.optimizer = build_optimizer(config.optimizer, self.module.parameters(), config.lr, config.weight_decay)
        self._model: nn.Module = self.module
        if not self.sharded:
            self._model = self.accelerator.prepare_model(self.module, evaluation_mode=True)
            if world.size > 1:
                self._model = DistributedDataParallel(
                    self._model,
                    device_ids=[world.device] if world.device.type == "cuda" else None,
                    process_group=world.group,
                    find_unused_parameters=True,
                    gradient_as_bucket_view=True,
                )
        self._stepper = self.accelerator.prepare_optimizer(self.optimizer)
        self.average: Average | None = None
        if config.averages:
            device = torch.device("cpu") if config.ema_device == "cpu" else world.device
            self.average = Average(self.module, config.ema_decay, device)
        self._parameters = [(p, block_bytes(local(p.detach()))) for p in self.module.parameters() if p.requires_grad]
        # Bytes of the gradients that are there, by their parameters' place; kept once someone asks for them.
        self._gradients: dict[int, int] = {}
        self._beside_buckets = False  # whether there are gradients that DDP has not yet put into its buckets
        self._noted_moments = 0
        self._note()

    def __call__(
        self, x: Tensor, t: Tensor, prompt: Tensor, features: Sequence[int] = ()
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Velocity [B, C, F, H, W] and block features [B, N, D], in the precision of the run."""
        with self.accelerator.autocast():
            return self._model(x, t, prompt, features)

    def predict(self, x: Tensor, t: Tensor, prompt: Tensor) -> Tensor:
        """The velocity for a picture: outside DDP, so one rank may ask alone (not when the student is sharded)."""
        with self.accelerator.autocast():
            velocity, _ = self.module(x, t, prompt)
        return velocity

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Wraps forward and backward of a micro-batch; gradients are averaged over the ranks in the last one."""
        if self.sharded:
            assert isinstance(self.module, FSDPModule)
            self.module.set_requires_gradient_sync(last)
            yield
            if last and self._replicated:
                self._average_replicated()
        elif last or self._world.size == 1:
            yield
            self._beside_buckets = False
        else:
            assert isinstance(self._model, DistributedDataParallel)
            with self._model.no_sync():
                yield
            self._beside_buckets = True

    def _average_replicated(self) -> None:
        gradients = [p.grad for p in self._replicated if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self._world.sum_(flat).div_(self._world.size)
        for gradient, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))

    def backward(self, loss: Tensor) -> None:
        """Backward, scaled under fp16."""
        self.accelerator.backward(loss)

    def step(self, step: int, max_norm: float) -> Tensor:
        """Clips, takes optimizer step `step` (from 0) and moves the average; returns the norm before clipping."""
        self.accelerator.unscale_gradients(self._stepper)
        norm = self._clip(max_norm)
        seed_rounding(self._config.seed, step)
        self._stepper.step()
        # First, so that none counts that is gone.
        self._gradients.clear()
        self._stepper.zero_grad()
        if self.average is not None:
            self.average.update(self.module, step)
        if len(self.optimizer.state) > self._noted_moments:
            self._note()
        return norm

    def _clip(self, max_norm: float) -> Tensor:
        # Sharded and whole gradients cannot be stacked together: each kind has a norm, of which the norm is taken.
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        kinds = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (False, True)]
        norms = [_whole(get_total_norm([p.grad for p in kind if p.grad is not None])) for kind in kinds if kind]
        total = torch.linalg.vector_norm(torch.stack(norms))
        for kind in kinds:
            if kind:
                clip_grads_with_norm_(kind, max_norm, total)
        return total

    def _shard(self) -> None:
        """Shards the module over the ranks, and fills it from rank 0's weights if that has any."""
        whole_weights = self.module.state_dict()
        filled = self._world.broadcast(not any(tensor.is_meta for tensor in whole_weights.values()))
        # FSDP wants one dtype in a group. With half weights, Wan's float32 parts stay whole on every rank: 0.2 %.
        half = self._config.optimizer in HALF_WEIGHTS
        names = [n for n, p in self.module.named_parameters() if half and p.dtype == torch.float32]
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        self.module.to("meta")
        self._replicated = [self.module.get_parameter(name) for name in names]
        mesh = _mesh(self._world)
        for block in self.module.transformer.blocks:
            fully_shard(block, mesh=mesh, ignored_params=set(self._replicated))
        fully_shard(self.module, mesh=mesh, ignored_params=set(self._replicated))
        _fill_buffers(self.module.to_empty(device=self._world.device), buffers, self._world.device)
        self._replicated = [self.module.get_parameter(name) for name in names]
        if filled:
            for name, parameter in self.module.named_parameters():
                _fill(parameter.data, whole_weights[name], self._world)

    # --- state ---

    def state(self) -> dict[str, Any]:
        """Tensors of student, optimizer and average, as a checkpoint holds them; loading fills them in place."""
        state: dict[str, Any] = {
            "student": get_model_state_dict(self.module),
            "optimizer": get_optimizer_state_dict(self.module, self.optimizer),
        }
        if self.average is not None:
            state["average"] = self.average.weights
        return state

    def load_state(self, state: dict[str, Any], trainer: dict[str, Any]) -> None:
        """Takes over a state that a checkpoint has filled."""
        set_model_state_dict(self.module, state["student"])
        set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"])
        if self.accelerator.scaler is not None and trainer.get("scaler"):
            self.accelerator.scaler.load_state_dict(trainer["scaler"])
        self._note()

    def _note(self) -> None:
        """Notes for the metrics what lasts; again where torch makes it anew, as FSDP may in its first step."""
        hold("student", [*self.module.parameters(), *self.module.buffers()])
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        hold("optimizer", [value for value in moments if isinstance(value, Tensor)])
        self._noted_moments = len(self.optimizer.state)
        if self.average is not None:
            hold("average", self.average.weights.values())

    def watch_gradients(self) -> Callable[[], int]:
        """Starts to count gradients; returns what tells their bytes, which may be called from any thread.

        That thread never looks at a gradient itself: torch's backward works without Python's lock, and a `.grad` that
        another thread reads meanwhile may end the process. DDP's buckets are there all the time.
        """
        if isinstance(self._model, DistributedDataParallel):
            return lambda: (1 + self._beside_buckets) * sum(size for _, size in self._parameters)
        gradients = self._gradients
        note_gradients(self._parameters, gradients)
        return lambda: sum(list(gradients.values()))

    def trainer_state(self) -> dict[str, Any]:
        """What else goes into a checkpoint, as JSON."""
        scaler = self.accelerator.scaler
        return {"scaler": scaler.state_dict() if scaler is not None else None}

    def full_weights(self) -> dict[str, Tensor]:
        """The weights to export (averaged, where there is an average), whole and on the CPU; on rank 0, and empty
        elsewhere. All ranks must call it."""
        weights = self.average.weights if self.average is not None else dict(self.module.named_parameters())
        gathered = ((name, _whole(tensor.detach())) for name, tensor in weights.items())
        return {name: tensor.cpu() for name, tensor in gathered if self._world.is_main}


def note_gradients(parameters: Iterable[tuple[nn.Parameter, int]], gradients: dict[int, int]) -> None:
    """Has each parameter's bytes put into `gradients` under its place, as soon as its gradient is there."""
    for place, (parameter, size) in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(partial(_note_gradient, gradients, place, size))


def _note_gradient(gradients: dict[int, int], place: int, size: int, _: Tensor) -> None:
    gradients[place] = size


def _place(module: nn.Module, device: torch.device) -> None:
    """Moves a module to `device`; parameters on the meta device get memory, to be filled by DDP or a checkpoint."""
    if any(parameter.is_meta for parameter in module.parameters()):
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        _fill_buffers(module.to_empty(device=device), buffers, device)
    else:
        module.to(device)


def _fill_buffers(module: nn.Module, buffers: dict[str, Tensor], device: torch.device) -> None:
    """Gives buffers their values back, which `to_empty` forgets: Wan's rotary tables are in no state dict."""
    for name, buffer in buffers.items():
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, buffer.to(device))


def _mesh(world: World) -> DeviceMesh:
    if world.group is None:
        return init_device_mesh(world.device.type, (world.size,))
    return DeviceMesh.from_group(world.group, world.device.type)


def _fill(target: Tensor, source: Tensor, world: World) -> None:
    """Takes over rank 0's weights of one parameter; elsewhere `source` gives its shape only."""
    whole = source.to(world.device) if world.is_main else torch.empty_like(source, device=world.device)
    if isinstance(target, DTensor):
        target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))
    else:
        world.broadcast_(whole)
        target.copy_(whole)


def _whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    # An average on the CPU keeps a GPU mesh: gathered where the mesh is.
    gathered = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(gathered, DTensor)
    return gathered.full_tensor()
