"""The process that runs a command: quiet libraries, and compiled programs kept on disk for the next start."""

import ctypes
import gc
import importlib.util
import logging
import os
import re
import warnings
import zlib
from pathlib import Path

import jax

# Options of glibc's mallopt, and what they are set to: nothing is mapped by itself, and nothing is given back before
# the end. That is so in the first thread's heap alone, as no other can grow to any size; ONE_HEAP has all share it.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
KEPT_MEMORY = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1}
ONE_HEAP = {M_ARENA_MAX: 1}

DEVICES = Path("/dev")
TPU_VARIABLES = ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID", "MEGASCALE_SLICE_ID")  # of a pod's hosts

FEW_OBJECTS = 50_000  # new ones after which Python looks for garbage: what makes a program leaves many, none of it such

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
STAMP = "checked"  # a file in the cache folder: all entries older than it are whole


def start() -> None:
    """What every command does first, before it imports libraries that set up logging of their own."""
    quiet_libraries()
    gc.set_threshold(FEW_OBJECTS)
    if computes_on_cpu():
        jax.config.update("jax_platforms", "cpu")  # else a package for an accelerator that is not here would complain
        keep_memory(cpu_devices())
    enable_compilation_cache(Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache/flaxformer_lite/compiled"))


def quiet_libraries() -> None:
    """Keeps libraries from filling the screen; errors still show."""
    for name in ("absl", "jax", "orbax", "etils", "tensorflow_datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    warnings.filterwarnings("ignore", module=r"(jax|flax|orbax|tensorflow_datasets|google|etils)\.")


def computes_on_cpu() -> bool:
    """Whether JAX will find only a CPU here, as far as files and variables show before JAX starts.

    That the package for an accelerator is installed does not say that there is one: its compiler serves `plan` too.
    """
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not (has_tpu() or has_other_accelerator())


def has_tpu() -> bool:
    """Whether this machine is a host of TPU chips and has what drives them."""
    if importlib.util.find_spec("libtpu") is None:
        return False
    return _any_device("accel*", "vfio/[0-9]*") or any(name in os.environ for name in TPU_VARIABLES)


def has_other_accelerator() -> bool:
    """Whether a plugin of JAX is installed, and if it is one for GPUs, whether there is a GPU."""
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins is None:
        return False
    names = {path.name for folder in plugins.submodule_search_locations for path in Path(folder).glob("[!_]*")}
    for_gpus = all(name.startswith(("xla_cuda", "xla_rocm")) for name in names)
    return not for_gpus or _any_device("nvidia[0-9]*", "dxg", "nvhost-gpu", "kfd")  # dxg: Windows' Linux


def _any_device(*patterns: str) -> bool:
    return any(next(DEVICES.glob(pattern), None) for pattern in patterns)


def cpu_devices() -> int:
    """How many devices JAX will make of this CPU, by either of its switches."""
    if jax.config.jax_num_cpu_devices >= 0:  # which goes before the other
        return jax.config.jax_num_cpu_devices
    forced = re.findall(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(forced[-1]) if forced else 1


def keep_memory(devices: int) -> None:
    """Has the C library keep what is freed for what is asked for next; does nothing where it is not glibc.

    With one device it also turns JAX's asynchronous dispatch off, so JAX must not have looked for devices yet.

    On a CPU each step asks for its buffers anew, hundreds of MB. Given back in between, they come as fresh pages, which
    the system first fills with zeros: a fifth of a step's time.

    The buffers are asked for by the thread that runs a program. Where there is one device, that can be the first
    thread, if it waits for the program meanwhile; the others then have heaps of their own, and do not wait for each
    other when they ask for memory, as they do all the time while they compile. The threads of more devices must share
    the first one's. `benchmarks/kept_memory.py` measures it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not mallopt:
        return
    for option, value in (KEPT_MEMORY if devices == 1 else KEPT_MEMORY | ONE_HEAP).items():
        mallopt(option, value)
    if devices == 1:
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def enable_compilation_cache(folder: Path) -> None:
    """Keeps compiled programs in `folder`; an entry that a killed process left unfinished is deleted first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_truncated(folder)
    except OSError as error:
        logging.warning("%s: no compiled programs are kept there: %s", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def remove_truncated(folder: Path) -> None:
    """Deletes cache entries written since the last call that do not decompress.

    JAX writes entries in place and never replaces one, so a broken entry would be complained of at every start.
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
    """Whether `entry` decompresses; one in a format that is not known here counts as whole."""
    if entry[:4] == b"\x28\xb5\x2f\xfd":  # Zstandard, which JAX uses where it is installed
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
