"""What the training stages share: captured steps, the learning-rate schedule, the loop with its progress lines."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Log = Callable[[str], None]


class CapturedStep:
    """`step` as one CUDA graph, which saves the launch of its thousands of small kernels; on a CPU simply `step`.

    The step may touch static tensors only and draws its random numbers from `generator`. It runs a few times before the
    capture (to warm up the allocator and the autotuners), so set the learning rate to 0 until then.
    """

    def __init__(self, step: Callable[[], Tensor], generator: torch.Generator, warmup_runs: int = 3) -> None:
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        if generator.device.type != "cuda":
            return
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(warmup_runs):
                step()
        torch.cuda.current_stream().wait_stream(side_stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(generator)
        with torch.cuda.graph(self._graph):
            self._output = step()

    def __call__(self) -> Tensor:
        if self._graph is None:
            return self._step()
        self._graph.replay()
        return self._output


def adamw(parameters: list[nn.Parameter], betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """Fused AdamW whose learning rate, at first 0, is a tensor that a CUDA graph reads anew each time."""
    on_gpu = parameters[0].is_cuda
    learning_rate = torch.zeros((), device=parameters[0].device)
    return torch.optim.AdamW(
        parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=on_gpu, capturable=on_gpu
    )


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, constant up to a share of all steps, then linear decay to a floor."""

    steps: int
    peak: float
    warmup_steps: int
    constant_share: float
    floor: float = 0.01
    """Lowest share of the peak."""

    def __call__(self, step: int) -> float:
        done = step / self.steps
        decay = 1.0 if done < self.constant_share else max(self.floor, (1 - done) / (1 - self.constant_share))
        return self.peak * min(1.0, (step + 1) / self.warmup_steps) * decay


@dataclass(frozen=True)
class StageTime:
    """How long a training loop took, its captures and compilations left out, and its last mean loss."""

    steps: int
    seconds: float
    loss: float


def train(
    name: str,
    schedule: Schedule,
    optimizer: torch.optim.Optimizer,
    step: Callable[[int], Tensor],
    log: Log,
    log_every: int = 1000,
) -> StageTime:
    """Runs `step(i)`, which returns its loss, for each i of the schedule, with that step's learning rate.

    FloatingPointError when the mean loss since the last progress line is not finite.
    """
    start = time.perf_counter()
    total: Tensor | None = None
    since, mean = 0, math.nan
    for i in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"].fill_(schedule(i))
        loss = step(i).detach()
        total = loss.clone() if total is None else total + loss
        since += 1
        last = i + 1 == schedule.steps
        if (i + 1) % log_every == 0 or last:
            mean, total = total.item() / since, None
            since = 0
            if not math.isfinite(mean):
                raise FloatingPointError(f"{name}: the loss is not finite at step {i + 1}.")
            seconds = time.perf_counter() - start
            left = seconds / (i + 1) * (schedule.steps - i - 1)
            log(f"{name}: step {i + 1}/{schedule.steps}, loss {mean:.5f}, {seconds:.0f} s, {left:.0f} s left")
        elif (i + 1) % 20 == 0 and loss.is_cuda:
            torch.cuda.synchronize()  # so that the queue of launched graphs stays short
    return StageTime(schedule.steps, round(time.perf_counter() - start, 1), mean)


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Whether float32 matrix products and convolutions on a GPU may round their inputs to TF32, in this block."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled
    torch.backends.cudnn.benchmark = enabled
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before[1:]
