"""A planned step, and the devices that it is planned for."""

import dataclasses

from jax.sharding import Mesh

from flaxformer_lite.system.accelerators import Accelerator
from flaxformer_lite.system.memory import Memory
from flaxformer_lite.training import hlo
from flaxformer_lite.training.hlo import RINGS, Collective

UTILIZATION = 0.4


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices, mesh and compiler of a plan."""

    name: str  # of the accelerator
    accelerator: Accelerator
    mesh: Mesh
    compiler: str | None  # None: compiled for a CPU
    no_compiler: str = ""  # the reason, if compiled for a CPU
    # assumed share of the peak of matrix products, if no compiler estimates their time
    utilization: float = UTILIZATION
    slices: int = 1
    assumed: str = ""  # a size that the config only bounds

    @property
    def estimates_cycles(self) -> bool:
        """Whether the compiler estimates cycles; GPU compilers do not."""
        return bool(self.compiler and self.accelerator.clock)

    @property
    def mesh_shape(self) -> str:
        """The sizes of the mesh: '2 x 4 x 1'."""
        return " x ".join(map(str, self.mesh.devices.shape))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A compiled step for one batch shape; bytes, FLOPs and cycles are per device."""

    rows: int
    length: int
    flops: float  # of matrix products
    memory: Memory | None  # None: the compiler ran out of device memory
    program: hlo.Program | None  # None: the same
    shortage: str = ""  # the missing memory, from the compiler's error

    @property
    def sent(self) -> dict[Collective, int]:
        """Bytes that each device sends."""
        return self.compiled.sent

    @property
    def compiled(self) -> hlo.Program:
        """The program of a plan that the compiler has finished."""
        assert self.program is not None, self.shortage
        return self.program

    def compute_seconds(self, target: Target) -> float:
        """Returns the time of the compiler's cycles; else of the FLOPs at the utilization."""
        clock = target.accelerator.clock
        if target.estimates_cycles and clock and self.compiled.cycles:
            return self.compiled.cycles / clock
        return self.flops / (target.accelerator.flops * target.utilization)

    def send_seconds(self, target: Target) -> float:
        """Returns the time of all collectives, one after another."""
        return sum(size / speed(each, target.accelerator) for each, size in self.sent.items())

    def fits(self, target: Target) -> bool:
        """Whether a device has enough memory; TPU compilers check that themselves."""
        if self.memory is None:
            return False
        by_compiler = target.compiler is not None and target.accelerator.platform == "tpu"
        return by_compiler or self.memory.total <= target.accelerator.memory

    def bytes_beyond_links(self, accelerator: Accelerator) -> int:
        """Returns the bytes of collectives over devices that the fast links do not join."""
        return sum(
            size for each, size in self.sent.items() if not all(map(accelerator.joins, each.groups))
        )


def speed(collective: Collective, accelerator: Accelerator) -> float:
    """Returns the bytes a second of the slowest group of a collective."""
    return min(
        accelerator.speed(group, ring=collective.kind in RINGS) for group in collective.groups
    )
