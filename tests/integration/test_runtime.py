"""The process: the compilation cache without truncated entries, memory, and the devices."""

import ctypes
import os
import subprocess
import sys
import zlib

import jax
import pytest

from flaxformer_lite.system import runtime
from flaxformer_lite.training import processes

WHOLE = zlib.compress(bytes(range(256)) * 50)


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "jit_whole-cache").write_bytes(WHOLE)
    (tmp_path / "jit_torn-cache").write_bytes(WHOLE[: len(WHOLE) // 2])
    (tmp_path / "jit_torn-atime").write_bytes(b"12345678")
    return tmp_path


def entries(folder):
    return sorted(path.name for path in folder.glob("*-cache"))


def test_a_truncated_entry_is_deleted_and_a_complete_one_kept(cache):
    runtime.remove_truncated(cache)
    assert entries(cache) == ["jit_whole-cache"]


def test_an_empty_entry_counts_as_truncated(cache):
    (cache / "jit_empty-cache").write_bytes(b"")
    runtime.remove_truncated(cache)
    assert entries(cache) == ["jit_whole-cache"]


def test_entries_are_checked_only_once(cache):
    runtime.remove_truncated(cache)
    old = (cache / runtime.STAMP).stat().st_mtime - 10
    (cache / "jit_old-cache").write_bytes(b"torn, but from before the last check")
    os.utime(cache / "jit_old-cache", (old, old))
    (cache / "jit_new-cache").write_bytes(b"torn")
    runtime.remove_truncated(cache)
    assert entries(cache) == ["jit_old-cache", "jit_whole-cache"]


def test_an_empty_folder_stays_empty(tmp_path):
    runtime.remove_truncated(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_zstandard_entry_counts_as_complete_without_the_library():
    magic = b"\x28\xb5\x2f\xfd"
    try:
        import zstandard
    except ImportError:
        assert runtime.is_whole(magic + b"anything")
    else:
        whole = zstandard.ZstdCompressor().compress(WHOLE)
        assert runtime.is_whole(whole)
        assert not runtime.is_whole(whole[:-9])


def test_a_folder_that_cannot_be_created_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    runtime.enable_compilation_cache(tmp_path / "file" / "cache")
    assert "no compiled programs are kept there" in caplog.text
    assert "set JAX_COMPILATION_CACHE_DIR to a folder that can be written to" in caplog.text


def test_a_folder_that_is_read_only_is_a_warning_and_its_entries_are_used(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "jit_f-cache").write_bytes(WHOLE[:-9])  # would be removed
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write to any folder
    before = jax.config.jax_compilation_cache_dir
    try:
        runtime.enable_compilation_cache(tmp_path)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert f"{tmp_path}: no new compiled programs are kept there: Permission" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == ["jit_f-cache"]


TOUCH_AGAIN = """
import ctypes, resource
from flaxformer_lite.system import runtime
{keep}
libc, size = ctypes.CDLL(None), 200 << 20
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for round in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(block, 1, size)
    libc.free(block)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_kept_memory_is_reused_without_new_pages():
    def fresh_page_bytes(keep):
        words = [sys.executable, "-c", TOUCH_AGAIN.format(keep=keep)]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    assert fresh_page_bytes("") > 10 * fresh_page_bytes("runtime.keep_memory(devices=1)")


RUN_AGAIN = """
import os, resource, sys
devices, kept = (int(word) for word in sys.argv[1:])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
import jax, jax.numpy as jnp
from flaxformer_lite.system import runtime
from flaxformer_lite.training import meshes, parallel, processes
assert runtime.cpu_devices() == devices
if kept:
    runtime.keep_memory(kept)
rows = jnp.ones((2, 10 << 20))  # 40 MiB each
rows = parallel.shard_rows({"x": rows}, meshes.make_mesh(devices))["x"]
stored = jax.lax.optimization_barrier
program = jax.jit(lambda x: stored((y := stored(jnp.sin(x))) + y[:, ::-1]).sum(axis=1))
new_pages = []
for round in range(9):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jax.block_until_ready(program(rows))
    new_pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(new_pages) * resource.getpagesize())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_program_reuses_its_memory_on_one_device_and_on_two(devices):
    def fresh_page_bytes(kept):
        words = [sys.executable, "-c", RUN_AGAIN, str(devices), str(kept)]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    assert fresh_page_bytes(0) > 10 * fresh_page_bytes(devices)


COUNT_DEVICES = (
    "import jax; from flaxformer_lite.system import runtime; print(runtime.cpu_devices(), "
    "len(jax.devices()))"
)


@pytest.mark.parametrize(
    ("switches", "count"),
    [
        pytest.param({}, 1, marks=pytest.mark.slow),
        pytest.param({"JAX_NUM_CPU_DEVICES": "3"}, 3, marks=pytest.mark.slow),
        (
            {
                "XLA_FLAGS": "--xla_cpu_enable_fast_math=false "
                "--xla_force_host_platform_device_count=5"
            },
            5,
        ),
        ({"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, 1),
    ],
)
def test_the_number_of_cpu_devices_is_that_of_jax(switches, count):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    }
    words = [sys.executable, "-c", COUNT_DEVICES]
    counts = subprocess.run(
        words, env=environment | switches, capture_output=True, text=True, check=True
    ).stdout
    assert counts.split() == [str(count)] * 2


@pytest.mark.parametrize(
    ("platforms", "only_cpu"), [("cpu", True), ("cuda,cpu", False), ("tpu", False)]
)
def test_jax_platforms_determines_whether_jax_computes_on_a_cpu(monkeypatch, platforms, only_cpu):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert runtime.computes_on_cpu() is only_cpu


@pytest.mark.parametrize(
    ("package", "devices", "variables", "only_cpu"),
    [
        (None, [], [], True),
        (None, ["accel0", "nvidia0"], [], True),  # JAX cannot use them
        ("libtpu", [], [], True),  # for its compiler
        ("libtpu", ["vfio/vfio"], [], True),  # of any host of virtual machines
        ("libtpu", ["accel0"], [], False),
        ("libtpu", ["vfio/vfio", "vfio/0"], [], False),
        ("libtpu", [], ["TPU_WORKER_ID"], False),
        ("jax_plugins/xla_cuda13", [], [], True),
        ("jax_plugins/xla_cuda13", ["nvidiactl"], [], True),
        ("jax_plugins/xla_cuda13", ["nvidiactl", "nvidia3"], [], False),
        ("jax_plugins/xla_cuda12", ["dxg"], [], False),
        ("jax_plugins/xla_rocm7", ["kfd"], [], False),
        ("jax_plugins/of_another_maker", [], [], False),
    ],
)
def test_a_package_for_an_accelerator_counts_only_with_the_accelerator(
    monkeypatch, tmp_path, package, devices, variables, only_cpu
):
    monkeypatch.delenv("JAX_PLATFORMS")
    for name in variables:
        monkeypatch.setenv(name, "0")
    for name in devices:
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr(runtime, "DEVICES", tmp_path / "dev")
    (tmp_path / "packages").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])
    if package:
        (tmp_path / "packages" / package).mkdir(parents=True)
    assert runtime.computes_on_cpu() is only_cpu
    assert processes.is_tpu_host() is (package == "libtpu" and not only_cpu)


PACKAGE = """
def initialize():  # of a plugin, as JAX's for CUDA
    import jax
    if jax.config.jax_platforms != "cpu":
        raise RuntimeError("no library")

def get_library_path():  # of libtpu
    return __file__
"""


@pytest.mark.skipif(not runtime.computes_on_cpu(), reason="this machine has an accelerator")
@pytest.mark.parametrize(
    "package", ["libtpu", pytest.param("jax_plugins/xla_cuda13", marks=pytest.mark.slow)]
)
def test_a_run_starts_silently_with_a_package_for_a_missing_accelerator(tmp_path, package):
    """Such as for `plan`. JAX would load the package, and log errors."""
    (tmp_path / package).mkdir(parents=True)
    (tmp_path / package / "__init__.py").write_text(PACKAGE)
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    code = (
        "import jax; from flaxformer_lite.system import runtime; "
        "from flaxformer_lite.training import processes; "
        "runtime.start(); processes.initialize(None, None, None); print(jax.devices()[0].platform)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("cpu\n", "")
