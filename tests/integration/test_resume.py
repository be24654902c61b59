"""A stopped and resumed run is bit for bit the same as a run without a stop."""

import contextlib
import functools
import json
import math
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

from flaxformer_lite.cli import commands as program
from flaxformer_lite.data.cldr import phrase_families
from flaxformer_lite.evaluator import Evaluator
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.training import evaluations, identity, meshes, parallel
from flaxformer_lite.training import state as state_lib
from flaxformer_lite.training.checkpoint import Checkpoints
from flaxformer_lite.training.state import from_parts, to_parts

STEPS = runs.SMALL["train.num_steps"]
EVERY = runs.SMALL["train.checkpoint_every"]
EVALUATION = runs.SMALL["train.eval_every"]


def checkpoint_is_being_written(workdir: Path) -> bool:
    return any("tmp" in path.name for path in (workdir / "checkpoints").glob("*"))


def is_evaluating(workdir: Path, step: int) -> bool:
    return runs.last_step(workdir) >= step and not runs.lines_of(workdir, "validation")


def main_in_this_process(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Returns the exit code of `python -m flaxformer_lite ARGUMENTS`."""

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(program, "exit_now", end)
    with pytest.raises(SystemExit) as ended:
        program.main(arguments)
    return ended.value.code


@pytest.fixture(scope="module")
def stopped_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[tuple[int, str, int]]]:
    """A run stopped in every way, and the exit code, standard error and last step of each stop."""
    workdir = tmp_path_factory.mktemp("stopped") / "run"
    first = [*runs.flags(), f"--workdir={workdir}"]
    stops = []

    def stop(condition, number, *arguments):
        code, err = runs.stop_at(lambda: condition(workdir), number, "train", *arguments)
        stops.append((code, err, runs.last_step(workdir)))

    again = f"--workdir={workdir}"
    stop(lambda w: (w / "config.json").exists(), signal.SIGKILL, *first)  # while data is read
    stop(lambda w: (w / "checkpoints").exists(), signal.SIGKILL, again)  # while it compiles
    stop(lambda w: runs.last_step(w) >= 3, signal.SIGTERM, again)
    stop(lambda w: runs.last_step(w) >= EVERY + 3, signal.SIGINT, again)
    stop(checkpoint_is_being_written, signal.SIGKILL, again)
    stop(lambda w: is_evaluating(w, EVALUATION), signal.SIGTERM, again)
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "split": "tr')  # incomplete
    stop(lambda w: runs.last_step(w) >= EVALUATION + 2, signal.SIGKILL, again)
    newest = max((workdir / "checkpoints").glob("*[0-9]"), key=lambda path: int(path.name))
    shutil.rmtree(newest / "progress")  # damaged
    # the test split is next
    stop(lambda w: len(runs.lines_of(w, "validation")) == 2, signal.SIGTERM, again)
    process = runs.run("train", again)
    stops.append((process.returncode, process.stderr, runs.last_step(workdir)))
    return workdir, stops


@pytest.mark.slow
def test_exit_codes_distinguish_a_stopped_run_from_a_finished_one(stopped_run):
    kill = -signal.SIGKILL
    codes = [code for code, _, _ in stopped_run[1]]
    assert codes == [kill, kill, 143, 130, kill, 143, kill, 143, 0]


@pytest.mark.slow
def test_the_stops_are_at_the_intended_steps(stopped_run):
    steps = [step for _, _, step in stopped_run[1]]
    assert steps == sorted(steps)
    assert steps[:2] == [0, 0]
    assert 3 <= steps[2] < steps[3] < EVALUATION == steps[5] <= steps[6] < steps[7] == STEPS


@pytest.mark.slow
def test_the_message_after_a_signal_names_the_saved_step(stopped_run):
    for code, err, step in stopped_run[1]:
        if code in (143, 130):
            assert ("SIGTERM" if code == 143 else "SIGINT") in err
            assert f"stopped after step {step} and saved" in err or step == STEPS
        assert "Traceback" not in err


@pytest.mark.slow
def test_a_warning_names_the_damaged_checkpoint(stopped_run):
    workdir, stops = stopped_run
    (aside,) = (workdir / "checkpoints").glob("*.damaged")
    assert str(aside.with_suffix("")) in stops[7][1]
    assert "damaged" not in "".join(err for _, err, _ in stops[:7])


@pytest.mark.slow
def test_a_resumed_run_equals_a_run_without_a_stop_bit_for_bit(stopped_run, finished_run):
    workdir, _ = stopped_run
    assert runs.losses(workdir) == runs.losses(finished_run)
    assert list(runs.losses(workdir)) == list(range(1, STEPS + 1))
    runs.assert_same_arrays(
        runs.checkpoint_arrays(workdir, STEPS), runs.checkpoint_arrays(finished_run, STEPS)
    )


@pytest.mark.slow
def test_a_resumed_run_has_the_same_evaluations_and_test_line(stopped_run, finished_run):
    for split in ("validation", "test"):
        assert runs.lines_of(stopped_run[0], split) == runs.lines_of(finished_run, split)


@pytest.mark.slow
def test_every_line_of_the_log_is_complete(stopped_run):
    lines = (stopped_run[0] / "metrics.jsonl").read_bytes().split(b"\n")
    assert lines[-1] == b""
    assert all(line.startswith(b"{") and line.endswith(b"}") for line in lines[:-1])


SHAPES = {"finished_classifier": runs.CLASSIFIER, "finished_language_model": runs.LANGUAGE_MODEL}
STOP = 31  # in the second epoch of the language model's packed texts, without a checkpoint


@pytest.fixture(scope="module")
def stopped_as(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a copy of a finished run, by its fixture's name, stopped by a signal at step STOP."""
    write = metrics_log.MetricsWriter.write

    def write_and_signal(writer: metrics_log.MetricsWriter, step: int, *line, **words) -> None:
        write(writer, step, *line, **words)
        if step == STOP:
            signal.raise_signal(signal.SIGTERM)

    @functools.cache
    def stopped(name: str) -> Path:
        workdir = tmp_path_factory.mktemp(f"stopped_{name}") / "run"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(metrics_log.MetricsWriter, "write", write_and_signal)
            assert runs.fit(workdir, SHAPES[name]) == 143
        return workdir

    return stopped


def test_fewer_steps_than_are_done_are_refused_and_nothing_changes(
    finished_language_model, tmp_path, monkeypatch, capfd
):
    workdir = shutil.copytree(finished_language_model, tmp_path / "run")
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    done = runs.last_step(workdir)
    flags = [f"--workdir={workdir}", f"--config.train.num_steps={done - 1}"]
    assert main_in_this_process(monkeypatch, "train", *flags) == 2
    *_, error = capfd.readouterr().err.splitlines()
    assert error == (
        f"error: config.train.num_steps: the run in {workdir} has done {done:,} steps, got "
        f"{done - 1:,}; set it to that or more, or use a new --workdir."
    )
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finished_classifier", "finished_language_model"])
def test_a_resumed_run_of_another_architecture_is_the_same_bit_for_bit(
    stopped_as, request, tmp_path, name
):
    finished, resumed = (
        request.getfixturevalue(name),
        shutil.copytree(stopped_as(name), tmp_path / "run"),
    )
    stopped_at = runs.last_step(resumed)
    assert STOP <= stopped_at < STEPS and runs.lines_of(resumed, "test") == []
    useful = json.loads((resumed / f"checkpoints/{stopped_at}/record/metadata").read_text())[
        "useful_seconds"
    ]
    assert runs.fit(resumed, SHAPES[name]) == 0
    records = metrics_log.read_metrics(resumed / "metrics.jsonl")
    first = next(line for line in records if line["split"] == "train" and line["step"] > stopped_at)
    assert 0 < useful <= first["goodput"] * (first["seconds"] + 0.1)  # of both starts
    assert runs.losses(resumed) == runs.losses(finished)
    assert list(runs.losses(resumed)) == list(range(1, STEPS + 1))
    runs.assert_same_arrays(
        runs.checkpoint_arrays(resumed, STEPS), runs.checkpoint_arrays(finished, STEPS)
    )
    for split in ("validation", "test"):
        assert runs.lines_of(resumed, split) == runs.lines_of(finished, split) != []
    assert str(stopped_at) in {path.name for path in (stopped_as(name) / "checkpoints").iterdir()}
    for folder in ("samples", "checkpoints"):  # the checkpoint of the signal does not count
        assert {path.name for path in (resumed / folder).iterdir()} == {
            path.name for path in (finished / folder).iterdir()
        }


# Packed pairs in microbatches, until evaluations stop improving: the model soon overfits 60 pairs.
# GELU, as rounding can change the gradient of ReLU near 0, and Adam amplifies small gradients: with
# some seeds the losses on other devices, equal within 4e-7 up to some step, would differ by 1e-4.
RECIPE = {
    **runs.TINY,
    "model.activation": "gelu",
    "data.packing": True,
    "data.train_split": "train[:60]",
    "data.vocab_size": 400,
    "data.buckets": "(64,)",
    "optim.accumulate_steps": 2,
    "optim.learning_rate": 3e-2,
    "train.num_steps": 400,
    "train.eval_every": 8,
    "train.checkpoint_every": 3,
    "train.patience": 1,
}


@pytest.fixture(scope="module")
def stopped_early(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run of RECIPE that no signal stopped."""
    workdir = tmp_path_factory.mktemp("stopped_early") / "run"
    assert runs.fit(workdir, RECIPE) == 0
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_a_resumed_run_with_packing_accumulation_and_patience_is_the_same(
    devices, stopped_early, tmp_path, monkeypatch
):
    """Bit for bit on 1 device, up to rounding on 4; both end at the same evaluation."""
    whole, end = runs.losses(stopped_early), runs.last_step(stopped_early)
    write = metrics_log.MetricsWriter.write

    def write_and_signal(writer: metrics_log.MetricsWriter, step: int, *line, **words) -> None:
        write(writer, step, *line, **words)
        if step == 13:  # after the first evaluation; no step of a checkpoint
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(metrics_log.MetricsWriter, "write", write_and_signal)
        assert runs.fit(tmp_path / "parts", RECIPE) == 143
    assert 13 <= runs.last_step(tmp_path / "parts") < end < 400
    assert runs.fit(tmp_path / "parts", {**RECIPE, "parallel.data": devices}) == 0
    assert list(runs.losses(tmp_path / "parts")) == list(whole) == list(range(1, end + 1))
    if devices > 1:
        assert runs.losses(tmp_path / "parts") == pytest.approx(whole, rel=1e-5)
        return
    assert runs.losses(tmp_path / "parts") == whole
    runs.assert_same_arrays(
        *(runs.checkpoint_arrays(run, end) for run in (tmp_path / "parts", stopped_early))
    )
    for split in ("validation", "test"):
        assert runs.lines_of(tmp_path / "parts", split) == runs.lines_of(stopped_early, split) != []


@pytest.mark.slow
def test_a_run_resumes_with_another_backend_and_the_same_losses_up_to_rounding(
    stopped_as, finished_language_model, tmp_path
):
    resumed = shutil.copytree(stopped_as("finished_language_model"), tmp_path / "run")
    assert runs.fit(resumed, {**runs.LANGUAGE_MODEL, "model.backend": "blockwise"}) == 0
    assert json.loads((resumed / "config.json").read_text())["model"]["backend"] == "blockwise"
    assert runs.losses(resumed) == pytest.approx(runs.losses(finished_language_model), rel=1e-4)
    assert list(runs.losses(resumed)) == list(range(1, STEPS + 1))


@flax.struct.dataclass
class StateOfTheFirstVersion:
    """The state before there were moving averages; its checkpoints store `params` separately."""

    step: jax.Array
    params: dict | None
    opt_state: optax.OptState
    key_data: jax.Array


def test_a_checkpoint_of_the_first_version_is_restored(tmp_path):
    params, mesh = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(5)}, meshes.make_mesh(1)
    opt_state = optax.adam(1e-3).init(jax.tree.map(jnp.sin, params))
    old = StateOfTheFirstVersion(
        jnp.int32(7), params, opt_state, jax.random.key_data(jax.random.key(3))
    )
    written = Checkpoints(tmp_path)
    parts = {"params": params, "progress": old.replace(params=None)}
    written.save(7, parallel.replicate(parts, mesh), {"step": 7})
    written.close()
    record = tmp_path / "7/record/metadata"
    known = json.loads(record.read_text())
    assert known.pop("checksum").keys() == {
        "params",
        "progress",
        "record",
    }  # the first version had none
    record.write_text(json.dumps(known))
    state = state_lib.TrainState(old.step, params, opt_state, old.key_data)
    read = Checkpoints(tmp_path)
    restored, _ = read.restore_newest(
        parallel.whole_on(mesh, jax.eval_shape(lambda: to_parts(state)))
    )
    read.close()
    resumed = from_parts(restored)
    assert jax.tree.structure(resumed) == jax.tree.structure(state) and resumed.ema is None
    for one, other in zip(jax.tree.leaves(resumed), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_finished_run_is_not_changed(finished_run, monkeypatch, capsys):
    before = runs.files_below(finished_run)
    assert main_in_this_process(monkeypatch, "train", f"--workdir={finished_run}") == 0
    assert runs.files_below(finished_run) == before
    err = capsys.readouterr().err
    assert (
        "is complete; nothing was trained" in err
        and "test split, best step" in err
        and "exact_match" in err
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_a_finished_run_is_evaluated_again_with_another_average(finished_run, tmp_path):
    """The log names the checkpoints of the average, which are fewer than 6."""
    workdir = shutil.copytree(finished_run, tmp_path / "run")
    before = (workdir / "metrics.jsonl").read_text()
    wanted = {"train.average": "last:6", "train.keep_newest": 6}
    assert runs.fit(workdir, wanted) == 0
    after = (workdir / "metrics.jsonl").read_text()
    assert after.startswith(before)
    again, test = map(json.loads, after.removeprefix(before).splitlines())
    # The log no longer ends with the old result, in case this start is killed.
    assert again["split"] == "validation"
    kept = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())
    assert 1 < len(kept) < 6
    assert (
        test["split"] == "test"
        and test["parameters"] == f"average of steps {', '.join(map(str, kept))}"
    )
    assert runs.fit(workdir, wanted) == 0
    assert (workdir / "metrics.jsonl").read_text() == after


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_a_run_that_is_killed_before_its_new_evaluation_is_evaluated_at_the_next_start(
    finished_run, tmp_path, monkeypatch
):
    class Killed(BaseException):
        pass

    def killed(*arguments, **options):
        raise Killed

    workdir = shutil.copytree(finished_run, tmp_path / "run")
    wanted = {"decode.max_extra_length": 3}
    before = (workdir / "metrics.jsonl").read_text()
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Evaluator, "evaluate", killed)
        runs.fit(workdir, wanted)
    assert workdir_lib.read_config(workdir).decode.max_extra_length == 3
    assert runs.fit(workdir, wanted) == 0
    after = (workdir / "metrics.jsonl").read_text()
    *again, test = map(json.loads, after.removeprefix(before).splitlines())
    assert test["split"] == "test" and all(line["split"] == "validation" for line in again)
    old = [line for line in map(json.loads, before.splitlines()) if line["split"] == "test"]
    assert test["bleu"] != old[-1]["bleu"] or test["chrf"] != old[-1]["chrf"]
    assert runs.fit(workdir, wanted) == 0
    assert (workdir / "metrics.jsonl").read_text() == after


BEFORE = {"train.best_metric": "bleu", "train.num_steps": 16, "train.decode_examples": 8}


@pytest.mark.parametrize(
    ("changes", "step", "field"),
    [
        ({"decode.max_extra_length": 3}, 8, "config.decode.max_extra_length"),
        ({"train.decode_examples": 3}, 8, "config.train.decode_examples"),
        ({"decode.min_length": 2, "train.num_steps": 99}, 16, "config.decode.min_length"),
        # patience ends it
        ({"decode.min_length": 2, "train.num_steps": 99, "train.patience": 1}, 16, None),
        ({"decode.max_extra_length": 3}, 16, None),  # only the result is evaluated again
        ({"decode.tokens_per_batch": 512}, 8, None),  # changes no text
        ({}, 8, None),
    ],
)
def test_a_resumed_run_does_not_compare_scores_of_other_decoding_settings(
    tmp_path, changes, step, field
):
    before, config = runs.small_config(BEFORE), runs.small_config(BEFORE | changes)
    same = {"tokenizer": "t", "data": "d", "files": {}}
    record = json.loads(
        json.dumps({"step": step, **same, "measured": evaluations.decoding_settings(before)})
    )
    now = same | {"measured": evaluations.decoding_settings(config)}
    check = functools.partial(
        identity.check_resumed, record, now, workdir_lib.Workdir(tmp_path), config, {4: 2.0, 8: 1.0}
    )
    if field is None:
        return check()
    with pytest.raises(
        ValueError, match=rf"^{field}: up to step {step} validation was measured with .*'bleu'"
    ):
        check()
    identity.check_resumed(
        {**record, "measured": {}}, now, workdir_lib.Workdir(tmp_path), config, {}
    )  # of older versions


def test_losses_are_comparable_with_any_decoding_settings():
    assert evaluations.decoding_settings(runs.small_config({"decode.max_extra_length": 3})) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize(
    ("finished", "changes"),
    [
        ("finished_language_model", runs.LANGUAGE_MODEL),
        ("finished_run", {}),
    ],
    ids=["language model", "translator"],
)
def test_a_finished_run_resumes_with_more_steps(finished, changes, request, tmp_path):
    workdir = shutil.copytree(request.getfixturevalue(finished), tmp_path / "run")
    before = (workdir / "metrics.jsonl").read_text()
    assert runs.fit(workdir, {**changes, "train.num_steps": STEPS + 3}) == 0
    after = (workdir / "metrics.jsonl").read_text()
    assert after.startswith(before)
    new = [
        (record["step"], record["split"])
        for record in metrics_log.read_metrics(workdir / "metrics.jsonl")[-5:]
    ]
    assert new[:3] == [(STEPS + 1, "train"), (STEPS + 2, "train"), (STEPS + 3, "train")]
    assert new[3] == (STEPS + 3, "validation") and new[4][1] == "test"
    assert after.count('"test"') == 2


@pytest.mark.slow
def test_training_stops_when_patience_ends_and_does_not_resume(tmp_path):
    """A learning rate that always increases makes the loss worse eventually."""
    changes = {
        **runs.TINY,
        "optim.learning_rate": 0.3,
        "optim.warmup_steps": 400,
        "train.num_steps": 400,
        "train.eval_every": 4,
        "train.checkpoint_every": 4,
        "train.patience": 2,
    }
    assert runs.fit(tmp_path, changes) == 0
    losses = {record["step"]: record["loss"] for record in runs.lines_of(tmp_path, "validation")}
    best = min(losses, key=losses.get)
    assert len(losses) >= 3
    assert list(losses)[-3:] == [best, best + 4, best + 8] and best + 8 < 400
    (test,) = runs.lines_of(tmp_path, "test")
    assert test["step"] == best
    assert runs.last_step(tmp_path) == best + 8
    before = runs.files_below(tmp_path)
    assert runs.fit(tmp_path, changes) == 0
    assert runs.files_below(tmp_path) == before
    assert evaluations.early_stop({4: 1.0, 8: 1.0}, 1) is False  # the later of a tie is better


@pytest.mark.parametrize(
    ("scores", "patience", "stops"),
    [
        ({}, 1, False),
        ({1: 0.3}, 1, False),
        ({1: 0.3, 2: 0.2}, None, False),
        ({1: 0.3, 2: 0.2}, 1, True),
        ({1: 0.3, 2: 0.2}, 2, False),
        ({1: 0.3, 2: 0.2, 3: 0.1}, 2, True),
        ({1: 0.3, 2: 0.2, 3: 0.4}, 1, False),
    ],
)
def test_patience_counts_evaluations_since_the_best(scores, patience, stops):
    assert evaluations.early_stop(scores, patience) is stops


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_an_infinite_loss_is_an_error_with_advice_and_keeps_the_last_good_checkpoint(
    tmp_path, monkeypatch, capsys
):
    changes = {
        **runs.TINY,
        "optim.learning_rate": 1e30,
        "train.checkpoint_every": 1,
        "train.num_steps": 9,
    }
    arguments = ["train", *runs.flags(changes), f"--workdir={tmp_path / 'run'}"]
    assert main_in_this_process(monkeypatch, *arguments) == 1
    (error,) = runs.error_lines(capsys.readouterr().err)
    steps = sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert f"step {steps[-1] + 1}: loss " in error and "gradient norm " in error
    assert f"The newest checkpoint is of step {steps[-1]}. Try, in a new --workdir, " in error
    for advice in (
        "optim.learning_rate",
        "optim.warmup_steps",
        "optim.clip_norm",
        "model.norm_placement",
    ):
        assert advice in error
    assert all(math.isfinite(loss) for loss in runs.losses(tmp_path / "run").values())
    arrays = runs.checkpoint_arrays(tmp_path / "run", steps[-1])
    assert all(
        math.isfinite(float(abs(array).max()))
        for name, array in arrays.items()
        if name.startswith("params")
    )


@pytest.mark.slow
def test_a_signal_ends_a_process_before_it_has_compiled(tmp_path):
    cache, workdir = tmp_path / "cache", tmp_path / "run"
    layers = {
        "model.num_encoder_layers": 16,
        "model.num_decoder_layers": 16,
        "data.train_split": "train[:200]",
    }
    arguments = ["train", *runs.flags(layers), f"--workdir={workdir}"]
    with runs.started(*arguments, env={"JAX_COMPILATION_CACHE_DIR": str(cache)}) as process:
        runs.wait_until((workdir / "checkpoints").exists, process)
        time.sleep(2.5)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in err.decode()
    assert not list(cache.glob("jit_train_step*"))  # not compiled yet
    assert runs.last_step(workdir) == 0


@pytest.mark.slow
def test_a_truncated_entry_of_the_compilation_cache_is_replaced(tmp_path):
    """JAX would warn at every start, and never replace it."""
    changes = {**runs.TINY, "train.num_steps": 1}
    cache = tmp_path / "cache"

    def train(name: str) -> dict[int, float]:
        arguments = [*runs.flags(changes), f"--workdir={tmp_path / name}"]
        process = runs.run("train", *arguments, env={"JAX_COMPILATION_CACHE_DIR": str(cache)})
        assert process.returncode == 0, process.stderr
        assert "arning" not in process.stderr and "rror" not in process.stderr
        return runs.losses(tmp_path / name)

    expected = train("first")
    (entry,) = cache.glob("jit_train_step*-cache")
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    assert train("second") == expected
    assert len(entry.read_bytes()) > 0.9 * len(whole)  # compiled again, not to the same bytes


@pytest.mark.slow
def test_a_run_killed_at_20_random_moments_is_the_same_bit_for_bit(tmp_path):
    """The moments include the first compilation and the writing of checkpoints."""
    changes = {"train.num_steps": 500, "train.eval_every": 100}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    killed, reference = tmp_path / "killed", tmp_path / "reference"
    arguments = [*runs.flags(changes), f"--workdir={killed}"]
    rng = random.Random(7)
    moments = [("seconds", rng.uniform(0.5, 9)) for _ in range(7)]
    moments += [("steps", rng.randint(1, 15)) for _ in range(8)] + [("writing", 0)] * 4
    rng.shuffle(moments)
    moments.insert(0, ("compiling", 1.5))
    assert len(moments) == 20
    for kind, amount in moments:
        with runs.started("train", *arguments, env=cache) as process:
            started, first = time.monotonic(), runs.last_step(killed)
            while process.poll() is None:
                steps = runs.last_step(killed) - first
                if kind == "compiling" and (killed / "checkpoints").exists():
                    time.sleep(amount)
                    break
                if kind == "writing" and steps and checkpoint_is_being_written(killed):
                    break
                if kind == "seconds" and time.monotonic() - started > amount:
                    break
                if steps >= (amount if kind == "steps" else 15):
                    break
                time.sleep(0.003)
            assert process.poll() is None, process.stderr.read().decode()
            process.kill()
            process.wait()
    assert 0 < runs.last_step(killed) < 500
    for workdir in (killed, reference):
        process = runs.run("train", *runs.flags(changes), f"--workdir={workdir}", env=cache)
        assert process.returncode == 0, process.stderr
    assert runs.losses(killed) == runs.losses(reference)
    assert len(runs.losses(killed)) == 500
    runs.assert_same_arrays(
        runs.checkpoint_arrays(killed, 500), runs.checkpoint_arrays(reference, 500)
    )
    assert runs.lines_of(killed, "test") == runs.lines_of(reference, "test")


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both_and_saves(tmp_path):
    changes = {"parallel.data": 8, "train.decode_examples": 0, "train.num_steps": 100}
    arguments = ["train", *runs.flags(changes), f"--workdir={tmp_path}"]
    processes = runs.processes(
        2, *arguments, script=["-m", "flaxformer_lite"], stderr=runs.subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 240
        while runs.last_step(tmp_path) < 3:
            assert all(process.poll() is None for process in processes) and time.monotonic() < end
            time.sleep(0.05)
        processes[1].send_signal(signal.SIGTERM)  # process 0 writes the log
        assert [process.wait(timeout=120) for process in processes] == [143, 143]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    step = runs.last_step(tmp_path)
    assert (tmp_path / "checkpoints" / str(step)).is_dir()
    assert 3 <= step < 100


def write_text() -> dict[str, str]:
    """Writes pairs of phrases to files in this folder; returns the settings that name them."""
    phrases = phrase_families.phrases("en", "de", per_kind=40)
    for name, part in (
        ("train", phrases[:300]),
        ("validation", phrases[300:310]),
        ("test", phrases[310:320]),
    ):
        Path(f"{name}.en").write_text("\n".join(phrase.source for phrase in part))
        Path(f"{name}.de").write_text("\n".join(phrase.target for phrase in part))
    return {"data.dataset": "parallel_text"} | {
        f"data.{name}_files": f"{name}.en,{name}.de" for name in ("train", "validation", "test")
    }


@pytest.mark.slow
def test_a_run_on_custom_text_resumes_only_while_its_files_do_not_change(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    files = write_text()
    short = {"train.num_steps": 2, "train.eval_every": 2, "train.checkpoint_every": 2}
    assert runs.fit(tmp_path / "run", runs.TINY | files | short) == 0
    longer = f"--workdir={tmp_path / 'run'}"
    before = Path("validation.de").read_text()
    Path("validation.de").write_text(before.replace("1", "2", 1))
    assert main_in_this_process(monkeypatch, "train", longer, "--config.train.num_steps=4") == 2
    *_, error = capfd.readouterr().err.splitlines()
    assert (
        error.startswith("error: validation.de: not what the run in ")
        and "up to step 2; put the old one back" in error
    )
    assert main_in_this_process(monkeypatch, "evaluate", longer) == 2
    *_, error = capfd.readouterr().err.splitlines()
    assert error.startswith(
        "error: validation.de: not what the run was trained with; put the old text back"
    )
    Path("validation.de").write_text(before)
    assert main_in_this_process(monkeypatch, "evaluate", longer) == 0
    assert main_in_this_process(monkeypatch, "train", longer, "--config.train.num_steps=4") == 0
    assert runs.last_step(tmp_path / "run") == 4


@pytest.mark.slow
def test_a_run_and_its_corpus_may_be_moved_and_its_test_split_needs_its_files_only(
    tmp_path, monkeypatch, capfd
):
    old, new, away = (tmp_path / name for name in ("old", "new", "away"))
    for folder in (old, away):
        folder.mkdir()
    monkeypatch.chdir(old)
    files = write_text()
    short = {"train.num_steps": 2, "train.eval_every": 2, "train.checkpoint_every": 2}
    assert runs.fit(old / "runs" / "W", runs.TINY | files | short) == 0
    run = functools.partial(main_in_this_process, monkeypatch)
    longer = f"--workdir={new / 'runs' / 'W'}"

    old.rename(new)  # together
    monkeypatch.chdir(away)
    assert run("evaluate", longer) == 0
    whole = capfd.readouterr().out
    assert run("train", longer, "--config.train.num_steps=4") == 0

    for name in ("train", "validation", "test"):  # the corpus alone, under other names
        for side in ("en", "de"):
            (new / f"{name}.{side}").rename(away / f"{name}-of-mine.{side}")
    assert run("evaluate", longer) == 2
    *_, error = capfd.readouterr().err.splitlines()
    assert error.startswith("error: config.data.test_files: there is no file 'test.en'")
    assert "--config.data.test_files" in error
    (away / "train-of-mine.en").rename(away / "gone")
    test = f"--config.data.test_files={away}/test-of-mine.en,{away}/test-of-mine.de"
    assert run("evaluate", longer, test) == 0
    assert capfd.readouterr().out.splitlines()[0].startswith(whole.split(",")[0])
    (away / "gone").rename(away / "train-of-mine.en")
    others = [
        f"--config.data.{name}_files={name}-of-mine.en,{name}-of-mine.de"
        for name in ("train", "validation")
    ]
    assert run("train", longer, "--config.train.num_steps=6", test, *others) == 0
    assert runs.last_step(new / "runs" / "W") == 6

    changed = Path("test-of-mine.de")
    changed.write_text(changed.read_text().replace("1", "2", 1))
    assert run("evaluate", longer, test) == 2
    *_, error = capfd.readouterr().err.splitlines()
    assert error.startswith(f"error: {away}/test-of-mine.de: not what the run was trained with")


@pytest.mark.slow
def test_text_that_changes_before_the_first_checkpoint_does_not_use_the_old_tokenizer(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    files = write_text()
    changes = runs.TINY | files | {"train.num_steps": 2}
    run, flags = tmp_path / "run", runs.flags(changes)
    flags = ["train", *flags, f"--workdir={run}"]
    assert (
        runs.stop_at((run / "tokenizer.model").exists, signal.SIGKILL, *flags)[0] == -signal.SIGKILL
    )
    assert not list((run / "checkpoints").glob("*[0-9]"))
    old, tokenizer = Path("train.de").read_text(), (run / "tokenizer.model").read_bytes()
    Path("train.de").write_text(old[::-1])
    assert main_in_this_process(monkeypatch, *flags) == 2
    *_, error = capfd.readouterr().err.splitlines()
    assert error.startswith(f"error: {run / 'tokenizer.model'}: differs from the tokenizer that")
    assert "delete it" in error
    assert (run / "tokenizer.model").read_bytes() == tokenizer
    Path("train.de").write_text(old)
    assert main_in_this_process(monkeypatch, *flags) == 0
    assert (run / "tokenizer.model").read_bytes() == tokenizer
