"""Checkpoints: restored bit for bit on any devices, damaged ones detected, the best kept."""

import asyncio
import errno
import functools
import gc
import json
import shutil
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import runs
import tensorstore

from flaxformer_lite.fields import Config, TrainConfig
from flaxformer_lite.system import errors
from flaxformer_lite.system.errors import InputError, NotWritten
from flaxformer_lite.training import array_sums, checkpoint, meshes, origin, parallel
from flaxformer_lite.training.checkpoint import Checkpoints


def make_state(step: int) -> dict:
    """Returns parts like those of a run: parameters, and progress with optimizer state and key."""
    params = {
        "w": jax.random.normal(jax.random.key(step), (61, 67)),
        "b": jnp.full((3,), step / 3, jnp.bfloat16),
    }
    optimizer_state = optax.adam(1e-3).init(params)
    optimizer_state = jax.tree.map(
        lambda x: x + jnp.asarray(step / 7).astype(x.dtype), optimizer_state
    )
    key_data = jax.random.key_data(jax.random.key(step))
    return {
        "params": params,
        "progress": {"opt_state": optimizer_state, "key_data": key_data, "step": jnp.int32(step)},
    }


def shapes_on(num_devices: int) -> dict:
    """Returns the abstract parts of `make_state`, whole on each of the first devices."""
    return parallel.whole_on(meshes.make_mesh(num_devices), jax.eval_shape(lambda: make_state(0)))


def on(num_devices: int, state: dict) -> dict:
    return parallel.replicate(state, meshes.make_mesh(num_devices))


def save_steps(folder: Path, *steps: int, scores: dict[int, float] | None = None, **kept) -> None:
    checkpoints = Checkpoints(folder, scores=scores, **({"keep_newest": 9} | kept))
    for step in steps:
        checkpoints.save(step, on(1, make_state(step)), {"step": step, "note": f"näher {step}"})
    checkpoints.close()


def restore_newest(folder: Path, num_devices: int = 1) -> tuple[dict, dict] | None:
    checkpoints = Checkpoints(folder, keep_newest=9)
    try:
        return checkpoints.restore_newest(shapes_on(num_devices))
    finally:
        checkpoints.close()


def steps_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_same(first: dict, second: dict) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes()


def array_files(step_folder: Path) -> list[Path]:
    """Returns the files of array data, the largest first."""
    files = [path for path in step_folder.rglob("*") if path.is_file() and "/d/" in str(path)]
    assert files
    return sorted(files, key=lambda path: path.stat().st_size, reverse=True)


@pytest.fixture(autouse=True, scope="module")
def collected_quickly() -> Iterator[None]:
    """Excludes objects of other tests of this process from garbage collection."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_leftovers_of_failed_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Silences the coroutines that Orbax leaves behind if one of several reads fails."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    yield
    gc.collect()


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 2, 3 and 5, to copy."""
    folder = tmp_path_factory.mktemp("checkpoints") / "three"
    save_steps(folder, 2, 3, 5)
    return folder


@pytest.fixture
def folder(three_steps: Path, tmp_path: Path) -> Path:
    """A copy of `three_steps` to damage."""
    return Path(shutil.copytree(three_steps, tmp_path / "checkpoints"))


def test_a_state_is_restored_bit_for_bit_with_its_optimizer_state(folder):
    parts, record = restore_newest(folder)
    assert_same(parts, make_state(5))
    assert (record["step"], record["note"]) == (5, "näher 5")
    with pytest.raises(AssertionError):  # the states of 2 steps differ
        assert_same(parts, make_state(3))


@pytest.mark.parametrize(("writers", "readers"), [(8, 1), (1, 8)])
def test_a_checkpoint_is_restored_whole_on_another_number_of_devices(tmp_path, writers, readers):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, on(writers, make_state(1)), {"step": 1})
    checkpoints.close()
    parts, _ = restore_newest(tmp_path, readers)
    assert_same(parts, make_state(1))
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(parts)} == {readers}
    assert all(x.is_fully_replicated for x in jax.tree.leaves(parts))


def test_parameters_alone_can_be_restored(folder):
    checkpoints = Checkpoints(folder, read_only=True)
    parts, _ = checkpoints.restore(3, {"params": shapes_on(1)["params"]})
    checkpoints.close()
    assert_same(parts, {"params": make_state(3)["params"]})


def test_restore_newest_returns_none_without_a_checkpoint(tmp_path):
    assert restore_newest(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("scores", "newest", "best", "expected"),
    [
        ({}, 2, 1, {"5", "6"}),
        ({1: 0.5, 2: 0.7, 3: 0.7, 4: 0.1}, 2, 1, {"3", "5", "6"}),  # a tie
        ({1: 0.5, 2: 0.7, 3: 0.7, 4: 0.1}, 1, 3, {"1", "2", "3", "6"}),
        ({1: 0.5, 2: 0.7}, 1, 0, {"6"}),
        ({6: 0.9, 5: 0.8}, 1, 1, {"6"}),  # the best may be the newest
    ],
)
def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path, scores, newest, best, expected):
    save_steps(tmp_path, 1, 2, 3, 4, 5, 6, scores=scores, keep_newest=newest, keep_best=best)
    assert steps_in(tmp_path) == expected


def test_the_best_step_is_the_later_of_a_tie_and_the_newest_without_scores(folder):
    for scores, expected in [({2: 1.0, 3: 1.0, 5: 0.5}, 3), ({}, 5), ({4: 9.0, 2: 0.1}, 2)]:
        checkpoints = Checkpoints(folder, scores=scores, read_only=True)
        assert checkpoints.best_step() == expected
        checkpoints.close()


def test_a_score_that_is_added_after_saving_counts(tmp_path):
    scores = {}
    checkpoints = Checkpoints(tmp_path, keep_newest=1, keep_best=1, scores=scores)
    for step in (1, 2, 3):
        checkpoints.save(step, on(1, make_state(step)), {})
        scores[step] = -step
    checkpoints.close()
    assert steps_in(tmp_path) == {"1", "3"}


DUE = origin.schedule(Config(train=TrainConfig(num_steps=11, eval_every=6, checkpoint_every=4)))


def test_checkpoints_are_due_at_evaluations_at_checkpoint_every_and_at_the_last_step():
    assert [step for step in range(13) if DUE(step)] == [4, 6, 8, 11, 12]


def test_a_checkpoint_of_a_signal_is_kept_while_it_is_the_newest_and_does_not_count(tmp_path):
    for saved, expected in [
        ((4, 6, 7), {"4", "6", "7"}),
        ((8,), {"6", "8"}),
        ((9,), {"6", "8", "9"}),
    ]:
        save_steps(tmp_path, *saved, keep_newest=2, keep_best=0, due=DUE)
        assert steps_in(tmp_path) == expected


def test_the_last_scheduled_and_the_best_steps_are_returned_oldest_first(folder):
    checkpoints = Checkpoints(
        folder, scores={2: 0.5, 3: 0.1, 5: 0.7}, due=lambda step: step != 3, read_only=True
    )
    assert checkpoints.steps_of("last", 2) == checkpoints.steps_of("best", 2) == [2, 5]
    assert checkpoints.steps_of("last", 1) == [5] and checkpoints.steps_of("best", 3) == [2, 3, 5]
    with pytest.raises(
        ValueError,
        match=r"last:3 needs 3 checkpoints, and 2 are kept; .* train\.keep_newest=3 or more",
    ):
        checkpoints.steps_of("last", 3)
    checkpoints.scores.pop(3)
    with pytest.raises(
        ValueError,
        match=r"needs 3 checkpoints with a score, and 2 are kept; .* train\.keep_best=3 or",
    ):
        checkpoints.steps_of("best", 3)
    checkpoints.close()


def test_an_average_is_the_mean_of_each_array_in_its_type():
    rng = np.random.default_rng(0)
    trees = [
        {"a": rng.normal(size=(3, 5)).astype(np.float32), "b": {"c": np.float32(n)}}
        for n in (1, 2, 4, 6)
    ]
    mean = array_sums.average(iter(trees))
    assert mean["a"].dtype == mean["b"]["c"].dtype == np.float32
    np.testing.assert_allclose(mean["a"], np.mean([tree["a"] for tree in trees], axis=0), rtol=1e-6)
    assert mean["b"]["c"] == 13 / 4
    np.testing.assert_array_equal(trees[0]["b"]["c"], 1)  # the inputs are unchanged


@pytest.mark.parametrize("count", [3, 5, 7])
def test_an_average_of_equal_arrays_is_exact_and_keeps_small_numbers(count):
    tree = {"x": np.float32([0.1, 1e-30, 1 / 3]), "y": jnp.full((2,), 0.7, jnp.bfloat16)}
    assert_same(array_sums.average(tree for _ in range(count)), tree)
    large = [{"x": np.float32([1e8])}, {"x": np.float32([1.0])}, {"x": np.float32([-1e8])}]
    # in float32 it would be 0
    np.testing.assert_allclose(array_sums.average(large)["x"], [1 / 3], rtol=1e-6)


def test_an_average_keeps_one_tree_in_memory_at_a_time():
    alive = []

    def read():
        for number in range(5):
            assert all(reference() is None for reference in alive)
            leaf = np.full(3, number, np.float32)
            alive.append(weakref.ref(leaf))
            yield {"x": leaf}
            del leaf

    assert array_sums.average(read())["x"].tolist() == [2, 2, 2] and len(alive) == 5


@pytest.mark.parametrize("num_devices", [1, 8])
def test_an_average_of_checkpoints_is_whole_on_each_device_and_has_the_last_record(
    folder, num_devices
):
    checkpoints = Checkpoints(folder, read_only=True)
    like = {"params": shapes_on(num_devices)["params"]}
    parts, record = checkpoints.restore_average([2, 3, 5], like)
    alone, _ = checkpoints.restore_average([3], like)
    checkpoints.close()
    trees = [make_state(step)["params"] for step in (2, 3, 5)]
    expected = jax.tree.map(
        lambda *x: np.mean([np.asarray(each, np.float64) for each in x], axis=0), *trees
    )
    np.testing.assert_allclose(parts["params"]["w"], expected["w"], rtol=1e-6)
    np.testing.assert_allclose(np.float64(parts["params"]["b"]), expected["b"], rtol=2**-8)
    assert parts["params"]["b"].dtype == jnp.bfloat16 and record["step"] == 5
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(parts)} == {num_devices}
    assert_same(alone, {"params": trees[1]})


def test_an_error_names_the_damaged_checkpoint_of_an_average(folder):
    flip_a_byte(folder / "3")
    checkpoints = Checkpoints(folder, read_only=True)
    with pytest.raises(ValueError, match=str(folder / "3")):
        checkpoints.restore_average([2, 3, 5], {"params": shapes_on(1)["params"]})
    checkpoints.close()


def refusal(folder: Path, step: int, scores: dict[int, float]) -> str:
    checkpoints = Checkpoints(folder, scores=scores, read_only=True)
    with pytest.raises(InputError) as refused:
        checkpoints.restore_average([step], {"params": shapes_on(1)["params"]})
    checkpoints.close()
    return str(refused.value).removeprefix(f"{folder / str(step)}: damaged checkpoint: ")


def test_an_error_says_which_checkpoints_to_remove_so_that_an_intact_one_is_used(folder):
    """The next best by score, as it is used after that; the newest if there are no scores."""
    spoil_the_record(folder / "5")
    reason = "record/metadata is not JSON; "
    best = f"remove {folder / '5'}; then step 2, which is intact, is used."
    assert refusal(folder, 5, {2: 0.5, 3: 0.25, 5: 0.75}) == reason + best
    newest = f"remove {folder / '5'}; then step 3, which is intact, is used."
    assert refusal(folder, 5, {}) == reason + newest
    empty_the_folder(folder / "3")
    both = f"remove {folder / '5'} and {folder / '3'}; then step 2, which is intact, is used."
    assert refusal(folder, 5, {}) == reason + both
    empty_the_folder(folder / "2")
    assert refusal(folder, 5, {}).startswith(f"{reason}no other can be read: restore the folder")


def test_what_other_threads_write_after_a_failed_write_is_removed_too(tmp_path):
    """The parameters do not fit on the disk, and meanwhile the optimizer's state is written."""
    checkpoints, incomplete = Checkpoints(tmp_path), tmp_path / f"4{checkpoint.UNFINISHED}"

    async def write_later(part, error=None):
        await asyncio.sleep(1)
        (incomplete / part).mkdir(parents=True)
        if error:
            raise error

    start = ocp.future.CommitFutureAwaitingContractedSignals
    others = [start(write_later("progress", ValueError("no"))), start(write_later("record"))]
    with pytest.raises(NotWritten), checkpoints._writing():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ValueError, match="no"):
        others[0].result()
    others[1].result()
    assert list(tmp_path.iterdir()) == []
    checkpoints.close()


def test_a_checkpoint_that_a_disk_fails_to_read_is_not_damaged_and_stays(folder):
    """A network disk may recover, and its checkpoints must not be renamed."""
    record = folder / "5" / "record" / "metadata"
    record.unlink()
    record.symlink_to("/proc/self/mem")  # reads of its start fail
    with pytest.raises(OSError, match="Input/output error") as failed:
        restore_newest(folder)
    assert failed.value.errno == errno.EIO and failed.value.filename == str(folder / "5")
    assert steps_in(folder) == {"2", "3", "5"}


def test_the_code_of_a_failed_read_is_found_in_tensorstore_s_text(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    store = tensorstore.KvStore.open(f"file://{tmp_path}/").result()
    with pytest.raises(ValueError, match="symbolic links") as cause:
        store.read("loop").result()
    with pytest.raises(OSError, match="symbolic links") as failed:
        errors.raise_unreachable(tmp_path, cause.value)
    assert failed.value.errno == errno.ELOOP
    errors.raise_unreachable(tmp_path, ValueError("DATA_LOSS: Truncated"))  # raises nothing


def test_a_step_that_exists_is_not_written_again(folder):
    checkpoints = Checkpoints(folder, keep_newest=9)
    checkpoints.save(5, on(1, make_state(7)), {"step": 7})
    checkpoints.close()
    assert_same(restore_newest(folder)[0], make_state(5))


@pytest.mark.parametrize("num_devices", [1, 8])
def test_later_steps_with_donated_buffers_do_not_change_a_saved_state(tmp_path, num_devices):
    """Orbax writes in the background while the next steps reuse the memory of the state."""
    step = jax.jit(
        functools.partial(jax.tree.map, lambda x: x + jnp.ones_like(x)), donate_argnums=0
    )
    state = on(num_devices, {"w": np.arange(1_000_000, dtype=np.float32), "n": np.int32(3)})
    saved = jax.tree.map(np.array, state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"params": state}, {})
    for _ in range(5):
        before, state = state, step(state)
    checkpoints.wait()
    assert before["w"].is_deleted()  # its memory was donated
    like = parallel.whole_on(meshes.make_mesh(1), {"params": saved})
    parts, _ = checkpoints.restore(1, like)
    checkpoints.close()
    assert_same(parts["params"], saved)
    assert np.asarray(state["n"]) == 8


def truncate_a_file(step_folder: Path) -> None:
    path = array_files(step_folder)[0]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def delete_a_file(step_folder: Path) -> None:
    array_files(step_folder)[0].unlink()


def flip_a_byte(step_folder: Path) -> None:
    path = array_files(step_folder)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty_the_folder(step_folder: Path) -> None:
    shutil.rmtree(step_folder)
    step_folder.mkdir()


def spoil_the_record(step_folder: Path) -> None:
    for path in (step_folder / "record").iterdir():
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-5])


def change_the_record(step_folder: Path) -> None:
    path = step_folder / "record/metadata"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "step": record["step"] + 1}))


def lose_the_record(step_folder: Path) -> None:
    path = step_folder / "record/metadata"
    path.write_text("[]")


def lose_the_checksums(step_folder: Path) -> None:
    path = step_folder / "record/metadata"
    path.write_text(json.dumps({**json.loads(path.read_text()), "checksum": []}))


def put_another_file_in_place_of_the_record(step_folder: Path) -> None:
    shutil.copy(step_folder / "_CHECKPOINT_METADATA", step_folder / "record/metadata")


def put_a_folder_in_place_of_the_record(step_folder: Path) -> None:
    (step_folder / "record/metadata").unlink()
    (step_folder / "record/metadata").mkdir()


def spoil_an_array_and_put_a_folder_in_place_of_the_record(step_folder: Path) -> None:
    put_a_folder_in_place_of_the_record(step_folder)
    flip_a_byte(step_folder)


DAMAGES = [truncate_a_file, delete_a_file, flip_a_byte, empty_the_folder, spoil_the_record]
DAMAGES += [change_the_record, lose_the_record, lose_the_checksums]
DAMAGES += [
    put_a_folder_in_place_of_the_record,
    spoil_an_array_and_put_a_folder_in_place_of_the_record,
]
DAMAGES += [put_another_file_in_place_of_the_record]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_reported_and_renamed_and_the_one_before_is_used(
    folder, caplog, damage
):
    damage(folder / "5")
    parts, record = restore_newest(folder)
    assert_same(parts, make_state(3))
    assert record["step"] == 3
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(folder / "5") in message and "step 3 is used" in message
    assert steps_in(folder) == {"2", "3", "5.damaged"}
    caplog.clear()
    assert restore_newest(folder)[1]["step"] == 3  # without another warning
    assert not caplog.records


def test_abandoned_reads_are_silent(tmp_path, monkeypatch, caplog):
    """Orbax reads each shard separately, and abandons the others if one is damaged."""
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.append(str(args.exc_value)))
    checkpoint.silence_abandoned_reads.cache_clear()
    mesh = meshes.make_mesh(8)
    shared = jax.NamedSharding(mesh, jax.P("data"))
    params = {
        f"w{number}": jax.random.normal(jax.random.key(number), (64, 33)) for number in range(20)
    }
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"params": jax.device_put(params, shared)}, {"step": 1})
    checkpoints.wait()
    for path in (tmp_path / "1" / "params" / "ocdbt.process_0" / "d").iterdir():
        data = path.read_bytes()
        path.write_bytes(
            bytes(byte ^ 1 for byte in data[: len(data) // 40]) + data[len(data) // 40 :]
        )
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shared), params
    )
    with pytest.raises(ValueError, match=r"damaged checkpoint: .*decompress"):
        checkpoints.restore(1, {"params": abstract})
    checkpoints.close()
    gc.collect()
    assert not reported and not caplog.records

    class FailsWhenDeleted:
        def __del__(self):
            raise ValueError("deleted")

    FailsWhenDeleted()
    assert reported == ["deleted"]  # other errors are still reported
    checkpoint.silence_abandoned_reads.cache_clear()


def test_a_flipped_byte_of_an_array_file_is_detected_or_harmless(folder):
    """Some bytes of a file contain no data. A successful restore returns the saved state."""
    path = array_files(folder / "5")[0]
    data = path.read_bytes()
    detected = 0
    for position in range(0, len(data), max(1, len(data) // 11)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        checkpoints = Checkpoints(folder, keep_newest=9, read_only=True)
        try:
            assert_same(checkpoints.restore(5, shapes_on(1))[0], make_state(5))
        except ValueError:
            detected += 1
        checkpoints.close()
    assert detected >= 5


def test_warnings_name_both_of_two_damaged_checkpoints(folder, caplog):
    flip_a_byte(folder / "5")
    empty_the_folder(folder / "3")
    assert restore_newest(folder)[1]["step"] == 2
    assert steps_in(folder) == {"2", "3.damaged", "5.damaged"}
    assert [
        str(folder / "5") in r.getMessage() or str(folder / "3") in r.getMessage()
        for r in caplog.records
    ] == [True] * 2


def test_a_damaged_step_can_be_written_again(folder):
    flip_a_byte(folder / "5")
    checkpoints = Checkpoints(folder, keep_newest=9)
    assert checkpoints.restore_newest(shapes_on(1))[1]["step"] == 3
    checkpoints.save(5, on(1, make_state(5)), {"step": 5})
    checkpoints.close()
    assert_same(restore_newest(folder)[0], make_state(5))
    flip_a_byte(folder / "5")  # damaged again
    assert restore_newest(folder)[1]["step"] == 3


def test_only_damaged_checkpoints_are_an_error_and_the_files_stay(folder):
    for step, damage in zip("235", DAMAGES, strict=False):
        damage(folder / step)
    before = runs.files_below(folder)
    with pytest.raises(ValueError, match=r"No other checkpoint is left.*copy.*--workdir") as error:
        restore_newest(folder)
    assert all(str(folder / step) in str(error.value) for step in "235")
    assert runs.files_below(folder) == before


def test_a_folder_of_other_files_is_an_error_and_the_files_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    (tmp_path / "pictures").mkdir()
    before = runs.files_below(tmp_path)
    with pytest.raises(ValueError, match=r"found only notes\.txt, pictures"):
        restore_newest(tmp_path)
    assert runs.files_below(tmp_path) == before


def test_a_file_with_the_name_of_a_step_is_skipped(folder):
    (folder / "7").write_text("not a checkpoint")
    assert restore_newest(folder)[1]["step"] == 5


def test_other_files_beside_checkpoints_are_ignored(folder):
    (folder / "notes.txt").write_text("not a checkpoint")
    assert restore_newest(folder)[1]["step"] == 5
    assert (folder / "notes.txt").exists()


def test_an_incomplete_checkpoint_of_a_killed_process_is_removed(folder):
    """Orbax writes into a folder of another name and renames it at the end."""
    left = folder / "8.orbax-checkpoint-tmp"
    shutil.copytree(folder / "5", left)
    truncate_a_file(left)
    assert restore_newest(folder)[1]["step"] == 5
    save_steps(folder, 8)
    assert_same(restore_newest(folder)[0], make_state(8))
    assert steps_in(folder) == {"2", "3", "5", "8"}


def test_an_incomplete_first_checkpoint_is_removed(folder, tmp_path):
    new = tmp_path / "new"
    shutil.copytree(folder / "5", new / "8.orbax-checkpoint-tmp")
    assert restore_newest(new) is None
    save_steps(new, 8)
    assert_same(restore_newest(new)[0], make_state(8))
    assert steps_in(new) == {"8"}


def test_read_only_checkpoints_do_not_change_the_folder(folder):
    shutil.copytree(folder / "5", folder / "8.orbax-checkpoint-tmp")
    before = runs.files_below(folder)
    checkpoints = Checkpoints(folder, read_only=True)
    assert checkpoints.steps() == [2, 3, 5]
    checkpoints.restore(5, shapes_on(1))
    checkpoints.close()
    assert runs.files_below(folder) == before


def test_arrays_of_another_shape_are_an_error_that_names_the_checkpoint(folder):
    like = shapes_on(1)
    like["params"]["w"] = jax.ShapeDtypeStruct(
        (61, 71), jnp.float32, sharding=like["params"]["w"].sharding
    )
    checkpoints = Checkpoints(folder, read_only=True)
    with pytest.raises(ValueError, match=str(folder / "5")):
        checkpoints.restore(5, like)
    checkpoints.close()


def test_a_checksum_depends_on_every_array_and_its_position():
    tree = {"a": np.arange(5.0), "b": np.arange(3)}
    swapped = {"a": np.arange(3), "b": np.arange(5.0)}
    changed = {"a": np.arange(5.0), "b": np.arange(3) + np.array([0, 0, 1])}
    reversed_ = {"a": np.arange(5.0)[::-1], "b": np.arange(3)}
    other_shape = {"a": np.arange(5.0), "b": np.arange(3), "c": np.zeros(0)}
    sums = {array_sums.checksum(x) for x in (tree, swapped, changed, reversed_, other_shape)}
    assert len(sums) == 5
    assert array_sums.checksum(jax.device_put(tree)) == array_sums.checksum(
        jax.tree.map(jnp.asarray, tree)
    )


@pytest.mark.parametrize(
    "spec", [(), ("a",), (None, "a"), ("a", None, "b"), (("a", "b"),), (None, ("b", "a"))]
)
def test_the_checksum_and_the_mean_of_an_array_do_not_depend_on_its_sharding(spec, monkeypatch):
    monkeypatch.setattr(array_sums, "HASHED_AT_ONCE", 5)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    whole = np.random.default_rng(3).normal(size=(16, 8, 2)).astype(np.float32)
    parts = jax.device_put(whole, split)
    assert (
        array_sums.checksum([parts])
        == array_sums.checksum([whole])
        != array_sums.checksum([whole + 1])
    )
    mean = array_sums.average([[parts], [jax.device_put(whole + 3, split)]])[0]
    assert mean.sharding == split
    np.testing.assert_allclose(mean, whole + 1.5, rtol=1e-6)


def test_a_failed_write_leaves_no_checkpoint(tmp_path, monkeypatch):
    """The next read works."""
    save_steps(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, keep_newest=9)
    with pytest.raises(Exception, match="JSON serializable"):
        checkpoints.save(2, on(1, make_state(2)), {"bad": object()})
        checkpoints.wait()
    assert "2" not in steps_in(tmp_path)
    assert restore_newest(tmp_path)[1]["step"] == 1


def test_damaged_metadata_of_a_step_is_one_message(folder):
    (folder / "3/_CHECKPOINT_METADATA").write_text("[]")
    with pytest.raises(ValueError, match=r"the metadata of a checkpoint is damaged: .*; restore"):
        Checkpoints(folder, read_only=True)
