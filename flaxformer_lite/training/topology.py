"""Descriptions of TPU and GPU devices, to compile for them on a machine that has only a CPU.

`libtpu` compiles for TPUs, and the CUDA plugin of JAX for NVIDIA GPUs. A function that is lowered
for such devices compiles as on the real ones, but cannot run.
"""

import importlib.metadata
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from flaxformer_lite.system.accelerators import ACCELERATORS
from flaxformer_lite.system.errors import InputError

LARGEST_SLICE = 4096  # chips
# Stops libtpu from searching for a TPU, other hosts and other processes.
LIBTPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# Autotuning needs a GPU. Without it, XLA's own kernels for float32 matrix products do not compile.
CUDA_FLAG = "--xla_gpu_enable_triton_gemm=false"
# GPU descriptions in XLA's format. H100 SXM: NVIDIA's H100 white paper, and the CUDA programming
# guide, compute capability 9.0.
GPUS = {
    "h100": """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  l2_cache_size: 52428800  memory_bandwidth: 3352320000000  device_memory_size: 84929347584
}
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 24 }
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""
}


class NoCompiler(Exception):
    """The compiler for an accelerator is not installed, or the accelerator has no description."""


def compiler(name: str) -> str:
    """Returns the name and version of the compiler for an accelerator, 'libtpu 0.0.42.1'.

    Raises:
      NoCompiler: it is not installed, or the accelerator has no description. The message says what
        to do.
    """
    on_tpu = ACCELERATORS[name].platform == "tpu"
    if not on_tpu and name not in GPUS:
        raise NoCompiler(f"the only GPU description available is {', '.join(GPUS)}")
    package, extra = ("libtpu", "plan") if on_tpu else ("jax-cuda13-plugin", "plan-cuda")
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        raise NoCompiler(
            f"{package} is not installed: pip install 'flaxformer_lite[{extra}]'"
        ) from None


def prepare(name: str) -> bool:
    """Sets the environment variables of an accelerator's compiler, before JAX starts.

    Returns:
      Whether the compiler is installed.
    """
    try:
        compiler(name)
    except NoCompiler:
        return False
    if ACCELERATORS[name].platform == "tpu":
        for variable, value in LIBTPU.items():
            os.environ.setdefault(variable, value)
    elif CUDA_FLAG not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CUDA_FLAG}"
    # JAX cannot read cache entries for such devices
    jax.config.update("jax_enable_compilation_cache", False)
    return True


def joined(name: str, count: int, *, slices: int = 1) -> int:
    """Returns how many of `count` devices are joined by fast links.

    These are the TPUs of a slice, or the GPUs of a machine (at most 8).

    Raises:
      InputError: no slice has the number of chips; the message starts with `--devices`.
    """
    accelerator = ACCELERATORS[name]
    if accelerator.platform == "gpu":
        return count if count <= accelerator.linked else math.gcd(count, accelerator.linked)
    return math.prod(slice_shape(name, count, slices=slices)) * accelerator.cores


def devices(name: str, count: int, *, slices: int = 1) -> Sequence[jax.Device]:
    """Returns `count` devices of an accelerator, ordered by TPU slice or GPU machine.

    Unlike on real machines, all GPUs have `slice_index` 0.

    Raises:
      NoCompiler: as `compiler`.
      InputError: as `joined`.
    """
    compiler(name)
    if ACCELERATORS[name].platform == "gpu":
        per_machine = joined(name, count)
        machines = f"{count // per_machine}x1x{per_machine}"
        return topologies.get_topology_desc(
            "any", "cuda", target_config=GPUS[name], topology=machines
        ).devices
    shape = slice_shape(name, count, slices=slices)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if math.prod(shape) < 4:
        options["chips_per_host_bounds"] = (*shape, 1)[:3]
    if name == "v4":
        # as on real machines, the 2 cores of a chip are one device
        options["chip_config_name"] = "megacore"
    chips = "x".join(map(str, shape))
    found = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{name}:{chips}", **options
    ).devices
    return sorted(
        found,
        key=lambda device: (getattr(device, "slice_index", 0), device.process_index, device.id),
    )


def slice_shape(name: str, count: int, *, slices: int = 1) -> tuple[int, ...]:
    """Returns the number of chips of a slice along each axis, as close to a cube as possible.

    Args:
      count: devices of all slices together.

    Raises:
      InputError: the number of chips of a slice is not a power of 2, or too large.
    """
    accelerator = ACCELERATORS[name]
    chips, rest = divmod(count, slices * accelerator.cores)
    most = min(LARGEST_SLICE, accelerator.linked // accelerator.cores)
    axes = 2 if name in ("v5e", "v6e") else 3
    if rest or not chips or chips & (chips - 1) or chips > most:
        of_devices = f" of {accelerator.cores} devices" if accelerator.cores > 1 else ""
        times = f", times --slices={slices}" if slices > 1 else ""
        raise InputError(
            f"--devices={count}: slices of {name} are planned with 1, 2, 4, 8, ... {most} "
            f"chips{of_devices}; choose such a number{times}."
        )
    shape, power = [], chips.bit_length() - 1
    for axis in range(axes):  # the first axes are the shorter ones
        shape.append(2 ** (power // (axes - axis)))
        power -= power // (axes - axis)
    return (2, 2, 1) if axes == 3 and chips == 4 else tuple(shape)
