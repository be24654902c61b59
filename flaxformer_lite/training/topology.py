"""Devices of TPUs and GPUs that are not here, described to their own compilers, which run on any CPU.

`libtpu` compiles for TPUs, and JAX's CUDA plugin for NVIDIA GPUs. A function that is lowered for such devices compiles
as on the real ones, and cannot be run.
"""

import importlib.metadata
import math
import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from flaxformer_lite.system.accelerators import ACCELERATORS
from flaxformer_lite.system.errors import InputError

LARGEST_SLICE = 4096  # chips
# Keeps libtpu from searching for a TPU, other hosts, and other processes.
LIBTPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# Autotuning needs a GPU, and without it XLA's own products of float32 matrices do not compile.
CUDA_FLAG = "--xla_gpu_enable_triton_gemm=false"
# How XLA describes a GPU. H100 SXM: NVIDIA's H100 white paper, and the CUDA programming guide, compute capability 9.0.
GPUS = {
    "h100": """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
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
    """The compiler of an accelerator is not installed, or there is no description for it."""


def compiler(name: str) -> str:
    """The name and version of the compiler for an accelerator, 'libtpu 0.0.42.1'.

    Raises:
      NoCompiler: it is not installed, or lacks a description of the accelerator; the message says what to do.
    """
    on_tpu = ACCELERATORS[name].platform == "tpu"
    if not on_tpu and name not in GPUS:
        raise NoCompiler(f"the only GPU description available is {', '.join(GPUS)}")
    package, extra = ("libtpu", "plan") if on_tpu else ("jax-cuda13-plugin", "plan-cuda")
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        raise NoCompiler(f"{package} is not installed: pip install 'flaxformer_lite[{extra}]'") from None


def prepare(name: str) -> bool:
    """Sets the environment of an accelerator's compiler, before JAX starts; False: the compiler is not installed."""
    try:
        compiler(name)
    except NoCompiler:
        return False
    if ACCELERATORS[name].platform == "tpu":
        for variable, value in LIBTPU.items():
            os.environ.setdefault(variable, value)
    elif CUDA_FLAG not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CUDA_FLAG}"
    jax.config.update("jax_enable_compilation_cache", False)  # JAX cannot read entries for such devices
    return True


def joined(name: str, count: int, *, slices: int = 1) -> int:
    """How many of `count` devices fast links join: those of a slice of TPUs, or of a machine of up to 8 GPUs.

    Raises:
      InputError: there are no such slices; the message begins with `--devices`.
    """
    accelerator = ACCELERATORS[name]
    if accelerator.platform == "gpu":
        return count if count <= accelerator.linked else math.gcd(count, accelerator.linked)
    return math.prod(slice_shape(name, count, slices=slices)) * accelerator.cores


def devices(name: str, count: int, *, slices: int = 1) -> Sequence[jax.Device]:
    """`count` devices of an accelerator, of one slice of TPUs or machine of GPUs after another.

    Unlike on real machines, all GPUs have the `slice_index` 0.

    Raises:
      NoCompiler: as `compiler`.
      InputError: as `joined`.
    """
    compiler(name)
    if ACCELERATORS[name].platform == "gpu":
        each = joined(name, count)
        shape = f"{count // each}x1x{each}"
        return topologies.get_topology_desc("any", "cuda", target_config=GPUS[name], topology=shape).devices
    shape = slice_shape(name, count, slices=slices)
    options = {"num_slices": slices} if slices > 1 else {}
    if math.prod(shape) < 4:
        options["chips_per_host_bounds"] = (*shape, 1)[:3]
    if name == "v4":
        options["chip_config_name"] = "megacore"  # as real ones are set up: the two cores of a chip are one device
    chips = "x".join(map(str, shape))
    found = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{chips}", **options).devices
    return sorted(found, key=lambda device: (getattr(device, "slice_index", 0), device.process_index, device.id))


def slice_shape(name: str, count: int, *, slices: int = 1) -> tuple[int, ...]:
    """The chips of a slice along each axis, for `count` devices over all slices; as close to a cube as possible.

    Raises:
      InputError: their number is no power of two, or too large.
    """
    accelerator = ACCELERATORS[name]
    chips, rest = divmod(count, slices * accelerator.cores)
    most, sides = min(LARGEST_SLICE, accelerator.linked // accelerator.cores), 2 if name in ("v5e", "v6e") else 3
    if rest or not chips or chips & (chips - 1) or chips > most:
        each = f" of {accelerator.cores} devices" if accelerator.cores > 1 else ""
        raise InputError(
            f"--devices={count}: slices of {name} are planned with 1, 2, 4, 8, ... {most} chips{each}; choose such a "
            "number" + (f", times --slices={slices}." if slices > 1 else ".")
        )
    shape, power = [], chips.bit_length() - 1
    for axis in range(sides):  # the first axes are the shorter ones
        shape.append(2 ** (power // (sides - axis)))
        power -= power // (sides - axis)
    return (2, 2, 1) if sides == 3 and chips == 4 else tuple(shape)
