"""Sets up the process of a command: quiet libraries, memory, and the compilation cache on disk."""

import ctypes
import gc
import importlib.util
import logging
import os
import re
import warnings
import zlib
from pathlib import Path
from typing import Any

import jax

from flaxformer_lite.system.storage import why_unwritable

# Options of glibc's mallopt. With KEPT_MEMORY nothing is allocated by mmap, and nothing is returned
# to the system. This holds for the heap of the first thread only, as other heaps cannot grow to any
# size; with ONE_HEAP all threads share it.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
KEPT_MEMORY = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1}
ONE_HEAP = {M_ARENA_MAX: 1}

DEVICES = Path("/dev")
TPU_VARIABLES = ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID", "MEGASCALE_SLICE_ID")  # of a pod's hosts

# New objects that start a garbage collection. Tracing and compiling create many that stay alive.
GARBAGE_THRESHOLD = 50_000

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
ADVICE = f"set {CACHE_VARIABLE} to a folder that can be written to"
STAMP = "checked"  # a file in the cache folder: older entries are known to be complete


def start() -> None:
    """Sets up the process; call it before imports of libraries that set up logging themselves."""
    quiet_libraries()
    gc.set_threshold(GARBAGE_THRESHOLD)
    if computes_on_cpu():
        # Otherwise the package of a missing accelerator would log errors.
        jax.config.update("jax_platforms", "cpu")
        keep_memory(cpu_devices())
    enable_compilation_cache(
        Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache/flaxformer_lite/compiled")
    )


def quiet_libraries() -> None:
    """Silences the logs of libraries below errors, and their warnings."""
    for name in ("absl", "jax", "orbax", "etils", "tensorflow_datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    warnings.filterwarnings("ignore", module=r"(jax|flax|orbax|tensorflow_datasets|google|etils)\.")


def computes_on_cpu() -> bool:
    """Whether JAX will find only a CPU, from files and variables, before JAX starts.

    An installed package for an accelerator does not show that the accelerator exists: `plan` uses
    its compiler too.
    """
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not (has_tpu() or has_other_accelerator())


def why_no_devices() -> str | None:
    """Returns why JAX cannot start on the platforms that JAX_PLATFORMS names; None if it can."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if not platforms:
        return None
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: no GPU for 'cuda'
        reason = (str(error).strip().splitlines() or ["there is no such device"])[0]
        reason = re.sub(r"^Unable to initialize backend '\w+': | \(set JAX_PLATFORMS.*", "", reason)
        return (
            f"JAX_PLATFORMS={platforms}: JAX cannot start: {reason.rstrip('.')}; set it to a "
            "platform of this machine, such as cpu, or unset it."
        )
    return None


def has_tpu() -> bool:
    """Whether this machine has TPU chips and libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        return False
    return _any_device("accel*", "vfio/[0-9]*") or any(name in os.environ for name in TPU_VARIABLES)


def has_other_accelerator() -> bool:
    """Whether a plugin of JAX is installed and, if it is for GPUs, whether there is a GPU."""
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins is None:
        return False
    names = {
        path.name
        for folder in plugins.submodule_search_locations or ()
        for path in Path(folder).glob("[!_]*")
    }
    for_gpus = all(name.startswith(("xla_cuda", "xla_rocm")) for name in names)
    # dxg is the GPU of the Windows Subsystem for Linux.
    return not for_gpus or _any_device("nvidia[0-9]*", "dxg", "nvhost-gpu", "kfd")


def _any_device(*patterns: str) -> bool:
    return any(next(DEVICES.glob(pattern), None) for pattern in patterns)


def cpu_devices() -> int:
    """Returns the number of CPU devices of JAX, from its option or from XLA_FLAGS."""
    options: Any = jax.config  # JAX adds an attribute for each option
    if options.jax_num_cpu_devices >= 0:  # has priority
        return options.jax_num_cpu_devices
    forced = re.findall(
        r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    return int(forced[-1]) if forced else 1


def keep_memory(devices: int) -> None:
    """Makes glibc keep freed memory for the next allocation; does nothing with another C library.

    With 1 device it also turns off JAX's asynchronous dispatch, so JAX must not have started yet.

    On a CPU each step allocates its buffers again, hundreds of MB. If they were returned to the
    system, it would fill the new pages with zeros, which takes 20 % of a step's time.

    The thread that runs a program allocates the buffers. With 1 device that is the first thread,
    without asynchronous dispatch; other threads keep their own heaps, and do not wait for each
    other's allocations while they compile. With more devices all threads share the first heap.
    `benchmarks/kept_memory.py` measures the difference.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not mallopt:
        return
    for option, value in (KEPT_MEMORY if devices == 1 else KEPT_MEMORY | ONE_HEAP).items():
        mallopt(option, value)
    if devices == 1:
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def enable_compilation_cache(folder: Path) -> None:
    """Sets `folder` as the compilation cache, and deletes truncated entries of killed processes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (reason := why_unwritable(folder)) is None:  # of another user: only read from it
            remove_truncated(folder)
    except OSError as error:
        logging.warning(
            "%s: no compiled programs are kept there: %s; %s", folder, error.strerror, ADVICE
        )
        return
    if reason is not None:
        logging.warning(
            "%s: no new compiled programs are kept there: %s; %s", folder, reason, ADVICE
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def remove_truncated(folder: Path) -> None:
    """Deletes cache entries since the last call that do not decompress.

    JAX writes entries in place and never replaces one, so it would warn of a truncated entry at
    every start.
    """
    stamp = folder / STAMP
    checked_until = stamp.stat().st_mtime if stamp.exists() else 0.0
    entries = [(entry, entry.stat().st_mtime) for entry in folder.glob("*-cache")]
    for entry, written in entries:
        if written >= checked_until and not is_whole(entry.read_bytes()):
            entry.unlink(missing_ok=True)
    if entries:
        stamp.touch()
        os.utime(stamp, (max(written for _, written in entries),) * 2)


def is_whole(entry: bytes) -> bool:
    """Whether `entry` decompresses; True if its format is unknown."""
    if entry[:4] == b"\x28\xb5\x2f\xfd":  # Zstandard, which JAX uses if it is installed
        return _zstandard_is_whole(entry)
    try:
        zlib.decompress(entry)
    except zlib.error:
        return False
    return True


def _zstandard_is_whole(entry: bytes) -> bool:
    try:
        import zstandard
    except ImportError:
        return True
    try:
        zstandard.ZstdDecompressor().decompress(entry)
    except zstandard.ZstdError:
        return False
    return True
