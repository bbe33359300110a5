"""Speeds of a machine: from the catalogue, or as a probe measured them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wandistill.planner.request import Machines

# Shares of the specified speeds that real work reaches. Measured on H100 and H200 SXM (torch 2.11, 14B-shaped forward
# of 1,560 to 16,384 tokens): 560 to 627 of 989 TFLOP/s once element-wise traffic at 0.9 of the bandwidth is taken off.
MATRIX_SHARE = 0.6
TRAFFIC_SHARE = 0.9
# A block's time over the time that it takes compiled: 1.247, 1.261 and 1.277 at 1,560, 3,120 and 12,480 tokens (H200,
# 14B-shaped, bfloat16, torch 2.11).
COMPILED_GAIN = 1.25
# Pinned copies: 53 to 55 of 63 GB/s from the host, 361 of 450 GB/s from a peer over NVLink (the same machines).
HOST_LINK_SHARE = 0.86
PEER_LINK_SHARE = 0.8
# Float32 on a core with AVX2 at 3 GHz: half of 2 x 8 x 2 operations a cycle. Memory of a two-socket server in GB/s.
CORE_GFLOPS = 48.0
HOST_BANDWIDTH = 150.0
# Seconds of PyTorch's addition of a few numbers in place: on a CPU of a server, and with the launch of a GPU's kernel.
# Virtual machines have taken three times as long; a run measures its own.
OPERATION = 2e-6
LAUNCH = 6e-6
# Between nodes, GB/s: 100 Gbit/s Ethernet.
NETWORK = 12.5


@dataclass(frozen=True)
class Rates:
    """Operations and bytes a second that work reaches on one device, and between devices."""

    half: float  # matrix operations in half precision
    float32: float  # in float32; TF32 on a GPU
    memory: float  # bytes of element-wise traffic
    host_link: float  # bytes from host memory to a GPU
    peer_link: float  # bytes from another GPU of the node
    network: float  # bytes from another node
    disk: float  # bytes of a node
    core: float  # float32 operations of one CPU core
    half_core: float  # the same in bfloat16
    host_memory: float  # bytes of a node's memory
    teacher: float = 1.0  # a block's measured seconds over those that the speeds above give
    student: float = 1.0  # the same of the student's blocks
    cores: float = 1.0  # the same of the teacher's, computed by a rank's share of the cores
    widening: float = 1.0  # the same of turning a stored block to what is computed with
    # Seconds that training what lies outside the student's blocks takes beyond those that the speeds above give: of few
    # operations, it is bound by launches. None: not measured, and the blocks' share is taken.
    outside: float | None = None
    operation: float = OPERATION  # seconds of an addition of a few numbers in place on the CPU
    launch: float = LAUNCH  # the same on the device

    def on_cores(self, machines: Machines) -> Rates:
        """Of the teacher where a rank's share of the cores is its device."""
        share, memory = machines.cores / machines.ranks, self.host_memory / machines.ranks
        half, float32 = share * self.half_core, share * self.core
        return replace(self, half=half, float32=float32, memory=memory, teacher=self.cores, widening=1.0)


def catalogue_rates(machines: Machines) -> Rates:
    """The speeds that the catalogue's numbers promise; without a GPU a device is a rank's share of the cores."""
    gpu, giga = machines.gpu, 1e9
    host = HOST_BANDWIDTH * giga
    common = {
        "network": NETWORK * giga,
        "disk": machines.disk_rate * giga,
        "core": CORE_GFLOPS * giga,
        "half_core": CORE_GFLOPS * giga,
        "host_memory": host,
    }
    if gpu is None:
        share = machines.cores / machines.ranks * CORE_GFLOPS * giga
        return Rates(share, share, host / machines.ranks, host / machines.ranks, host / machines.ranks, **common)
    return Rates(
        half=MATRIX_SHARE * gpu.bf16 * 1e12,
        float32=MATRIX_SHARE * gpu.tf32 * 1e12,
        memory=TRAFFIC_SHARE * gpu.bandwidth * giga,
        host_link=HOST_LINK_SHARE * gpu.host_link * giga,
        peer_link=PEER_LINK_SHARE * gpu.peer_link * giga,
        **common,
    )
