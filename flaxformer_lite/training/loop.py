"""Training: the one long function, from a config and a folder to a trained model."""

import contextlib
import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from flaxformer_lite import agreement, evaluate, places, trained
from flaxformer_lite import workdir as workdir_lib
from flaxformer_lite.config import Config, with_classes, with_vocabulary
from flaxformer_lite.data import batch_shapes, loader, own_text, pipeline
from flaxformer_lite.data.datasets import Dataset
from flaxformer_lite.data.tokenizer import Tokenizer
from flaxformer_lite.model import transformer
from flaxformer_lite.training import (
    accelerators,
    checkpoint,
    flops,
    metrics,
    optim,
    parallel,
    profile,
    report,
    sharding,
    writers,
)
from flaxformer_lite.training import step as step_lib
from flaxformer_lite.training.interrupt import Background, Interrupt, Interrupted, StopTogether
from flaxformer_lite.training.meter import Meter
from flaxformer_lite.training.programs import Programs


class Diverged(Exception):
    """The loss or the gradient is not a finite number any more."""


def fit(config: Config, workdir: Path) -> int:
    """Trains `config` in `workdir`, from its newest checkpoint if it has one, and measures the best model.

    Returns:
      0 when training is complete; 143 or 130 when SIGTERM or SIGINT stopped it, with everything saved.

    Raises:
      ValueError: the config, the data, the devices or the workdir do not fit together.
      Diverged: the loss or gradient is no longer finite; the checkpoints from before are kept.
    """
    agreement.check_config(config)
    mesh = parallel.make_mesh(config.parallel.data, config.parallel.fsdp, config.parallel.tensor)
    accumulate = config.optim.accumulate_steps
    parallel.check_rows(mesh, rows_multiple=config.data.rows_multiple, accumulate_steps=accumulate)
    dataset = agreement.together(lambda: pipeline.open_dataset(config))
    config = with_classes(config, dataset.label_names)
    agreement.together(lambda: workdir_lib.check(workdir, config))
    chief = jax.process_index() == 0
    with contextlib.ExitStack() as held:
        agreement.together(lambda: held.enter_context(workdir_lib.alone(workdir)) if chief else None)
        agreement.together(lambda: workdir_lib.check(workdir, config))  # another one may have been there meanwhile
        held.enter_context(workdir_lib.untouched_if_refused(workdir) if chief else contextlib.nullcontext())
        interrupt, compiler = held.enter_context(Interrupt()), held.enter_context(Background())
        try:
            _train(config, places.place(workdir), dataset, mesh, interrupt, compiler)
        except Interrupted as reason:
            if not reason.agreed:
                return interrupt.exit_code
        agreement.barrier("the run has ended")  # if process 0 went first, the others would take it for a failure
        return interrupt.exit_code


def _train(
    config: Config, workdir: Path, dataset: Dataset, mesh: Mesh, interrupt: Interrupt, compiler: Background
) -> None:
    """`fit` after its checks. Raises Interrupted where a signal stopped it, with the state saved."""
    started = time.monotonic()
    chief = jax.process_index() == 0
    begun, same_result = workdir_lib.has_run(workdir), workdir_lib.same_result(workdir, config)  # at the last start
    agreement.barrier("the last start's config is read")
    paths = agreement.together(lambda: _create(workdir, config, same_result) if chief else workdir_lib.Workdir(workdir))
    agreement.check_workdir(workdir)

    # What a step is made of: model, optimizer, devices. Whatever may take long runs in a background thread, so that
    # a signal is heard meanwhile, and the steps compile while the data is read.
    wait = interrupt.wait_for
    config = with_vocabulary(config, config.data.vocab_size)
    schedule = {"d_model": config.model.d_model, "num_steps": config.train.num_steps}
    rates = jax.device_get(optim.learning_rate(np.arange(1, config.train.num_steps + 1), config.optim, **schedule))
    mode = parallel.MODES[config.parallel.mode](mesh)
    train_step, initial_state = step_lib.of_config(config, axis_name=mode.axis_name, row_shards=mode.row_shards)
    state_shapes = jax.eval_shape(initial_state)
    sharding.check(state_shapes.params, mesh)
    programs = Programs(config, mode, train_step, state_shapes, compiler, wait)

    # Where it starts: at the newest checkpoint, or at step 0, which may have weights from elsewhere and nothing else.
    scores: dict[int, float] = {}  # of each evaluated step, higher is better
    kept = {"keep_newest": config.train.keep_newest, "keep_best": config.train.keep_best}
    checkpoints = checkpoint.Checkpoints(paths.checkpoints, scores=scores, due=trained.schedule(config), **kept)
    imported = workdir_lib.is_untrained(paths.path)
    restored = None if imported else checkpoints.restore_newest(mode.held(_to_parts(state_shapes)))
    done = int(restored[1]["step"]) if restored else 0
    scores.update(_known_scores(restored[1], paths, config.train.best_metric) if restored else {})
    if same_result and _is_finished(paths, config, done, scores):
        checkpoints.close()
        return report.say(f"{workdir} is complete; nothing was trained.\n" + report.closing_table(paths.metrics))
    fresh = None if restored else Background.once(mode.make_state, initial_state)
    if fresh and jax.process_count() > 1:  # what all devices run, they must run in the same order
        wait(fresh)
    ahead = done < config.train.num_steps and mode.compiles_ahead
    programs.start_all(batch_shapes.possible(config) if ahead and config.data.num_buckets is None else ())
    load = functools.partial(pipeline.load, config, dataset, paths.tokenizer, begun and not (restored or imported))
    data = agreement.together(lambda: wait(Background.once(load)))
    _check_tokenizer(data.tokenizer, config, paths)
    identity = _identity(data, dataset) | {"measured": _how_measured(config)}
    _check_identity(restored[1] if restored else None, identity, paths, config, scores)
    programs.start_all(data.train.plan.shapes() if ahead else ())
    state = mode.put_state(_from_parts(restored[0])) if restored else wait(fresh)
    state = _with_weights(state, state_shapes, checkpoints, mode) if imported else state

    stop = StopTogether(interrupt, mesh)
    options = {"label_names": data.label_names, "compile_with": programs.get_other, "between_batches": stop.now}
    evaluator = evaluate.Evaluator(transformer.build_model(config.model), config, mode, data.tokenizer, **options)
    writer = writers.MetricsWriter(paths.logs, started=started, enabled=chief, publish=paths.publish_logs)
    progress = writers.Progress(done, config.train.num_steps, enabled=chief)
    useful = restored[1].get("useful_seconds", 0.0) if restored else 0.0
    unit = "examples" if config.model.architecture == "encoder_classifier" else "tokens"
    meter = Meter(unit, peak=accelerators.peak(mesh.devices.flat), elapsed=writer.elapsed, useful=useful)

    def settle(step: int, sums: Any) -> None:
        """Reads the metrics of `step`, which waits for it; checks, logs and shows them."""
        sums = mode.read(sums)
        values = metrics.divide(sums)
        _check_finite(step, values, checkpoints)
        meter.add(float(sums["loss"][1]), flops.train_examples(config, *data.train.lengths(step - 1)))
        values["learning_rate"] = float(rates[step - 1])
        progress.update(step, {"loss": values["loss"], "lr": values["learning_rate"], f"{meter.unit}/s": meter.rate()})
        if step % config.train.log_every == 0 or evaluation_is_due(step):  # training may end at an evaluation
            writer.write(step, "train", values | meter.line())

    def save() -> None:
        known = {"label_names": data.label_names, "scores": {str(step): score for step, score in scores.items()}}
        known |= {"useful_seconds": meter.useful}
        writer.flush()
        checkpoints.save(done, _to_parts(mode.over_mesh(state)), {"step": done, **identity, **known})

    def measure() -> None:
        """Evaluates the state on validation data, and notes how good it is."""
        whole, count = mode.over_mesh(state.measured), config.train.decode_examples
        measured = evaluator.measure(state.measured, whole, data.validation, decode=count)
        values = measured.values
        if chief and measured.samples:
            paths.write_sample(f"{done}.txt", measured.samples)
            progress.note("\n".join(measured.samples.splitlines()[:8]))
        writer.write(done, "validation", values, parameters=trained.Origin((done,), trained.measured(config)).remark)
        progress.note(f"step {done}  validation  " + "  ".join(f"{k} {v:.4g}" for k, v in values.items()))
        scores[done] = metrics.score(values, config.train.best_metric)

    def evaluation_is_due(step: int) -> bool:
        return step > 0 and (step % config.train.eval_every == 0 or step == config.train.num_steps)

    unsettled = None  # (step, its metrics, still on the devices)
    try:
        if evaluation_is_due(done) and done not in scores:
            measure()
        report.say(report.resolved(config, data, mesh, state_shapes.params))
        batches = pipeline.batches(data.train, num_steps=config.train.num_steps, part=parallel.rows_of_process(mesh))
        stream = meter.waiting_for(loader.stream(batches, mode.put_batch, first_step=done), lambda: unsettled)
        if config.train.profile and chief:
            seen = {"programs": programs.futures, "wait": lambda: jax.block_until_ready(state), "show": progress.note}
            stream = profile.traced(stream, paths.profile, **seen)
        meter.restart()
        for batch in stream:
            if early_stop(scores, config.train.patience):
                break
            with meter.paused():
                run_step = programs.get(data.train.plan.shape(done))
            state, sums = run_step(state, batch)
            done += 1
            if unsettled:  # only now, with the next step on its way, or made where a step is waited for at once
                settle(*unsettled)
            unsettled = (done, sums)
            if checkpoints.due(done):
                settle(*unsettled)
                unsettled = None
                with meter.paused():
                    save()
            if evaluation_is_due(done):
                with meter.paused():
                    measure()
            stop.soon()
    except jax.errors.JaxRuntimeError as error:
        raise programs.explained(error) from None
    except Interrupted as reason:
        if reason.agreed:
            if unsettled:
                settle(*unsettled)
            save()
            checkpoints.wait()
            report.say(f"stopped after step {done} and saved; to go on: the same command with --workdir={paths.path}")
        raise
    finally:
        progress.close()
        writer.flush()
        checkpoints.wait()
    if batches.drawn:
        report.say(report.drawn(batches))

    # The result: the best parameters, or the average that was asked for, on the test split.
    params, _, origin = trained.restore(checkpoints, mode.held(state_shapes.params), config)
    checkpoints.close()
    read_test = functools.partial(pipeline.read_part, dataset, "test", data.tokenizer, config)
    test = agreement.together(lambda: wait(Background.once(read_test)))
    report.say_left_out("test", test)
    measured = evaluator.measure(mode.put_state(params), params, test)
    if chief:
        paths.write_sample("test.txt", measured.samples)
        evaluate.save(measured, paths.samples, run=paths.path, split="test", config=config, origin=origin)
        writer.write(origin.step, "test", measured.values, parameters=origin.remark)
        writer.close()
        report.say("\n".join(text for text in (report.closing_table(paths.log), measured.note) if text))
        report.say(report.written(paths, config, time.monotonic() - started, meter.goodput()))


def _create(workdir: Path, config: Config, same_result: bool) -> workdir_lib.Workdir:
    """The workdir with this start's config, in which a result of another one is none any more.

    So the next start measures it anew, however soon this one is killed.
    """
    paths = workdir_lib.Workdir(workdir)
    if not same_result and workdir_lib.has_run(workdir):
        try:
            paths.fetch_logs()
            writers.reopen(paths.log)
        except OSError as error:
            raise ValueError(f"{paths.log}: cannot be written: {error.strerror or error}.") from error
        paths.publish_logs()
    return workdir_lib.create(workdir, config)


def early_stop(scores: dict[int, float], patience: int | None) -> bool:
    """Whether `patience` evaluations have passed since the best one."""
    if patience is None or not scores:
        return False
    best = checkpoint.best_first(list(scores), scores)[0]
    return sum(step > best for step in scores) >= patience


def _to_parts(state: step_lib.TrainState) -> dict[str, Any]:
    """The parts of a checkpoint; `params`, or `ema` where there is one, are all that decoding has to read."""
    progress = step_lib.Progress(state.step, opt_state=state.opt_state, key_data=state.key_data)
    parts = {"params": state.params, "progress": progress}
    return parts if state.ema is None else {**parts, "ema": state.ema}


def _from_parts(parts: dict[str, Any]) -> step_lib.TrainState:
    progress = parts["progress"]
    return step_lib.TrainState(
        progress.step, parts["params"], progress.opt_state, progress.key_data, ema=parts.get("ema")
    )


def _with_weights(
    state: step_lib.TrainState, shapes: step_lib.TrainState, checkpoints: checkpoint.Checkpoints, mode: Any
) -> step_lib.TrainState:
    """`state` with the weights of step 0 that came from elsewhere, which are their moving average too."""
    held = mode.held({"params": shapes.params})
    weights = lambda: mode.put_state(checkpoints.restore(0, held)[0]["params"])  # noqa: E731  (no buffer is shared)
    return state.replace(params=weights(), ema=None if state.ema is None else weights())


def _identity(data: pipeline.Data, dataset: Dataset) -> dict[str, Any]:
    """What a run is trained on, the same in every process, as its checkpoints keep it."""
    identity = {"tokenizer": data.tokenizer.fingerprint, "data": data.fingerprint, "files": dataset.contents}
    fingerprints = {name: identity[name] for name in ("tokenizer", "data")} | identity["files"]
    agreement.check_same(fingerprints, "give every process the same files")
    return identity


def _check_tokenizer(tokenizer: Tokenizer, config: Config, paths: workdir_lib.Workdir) -> None:
    if tokenizer.vocab_size != config.data.vocab_size:
        raise ValueError(
            f"{paths.tokenizer}: expected a tokenizer of {config.data.vocab_size} pieces (data.vocab_size), got "
            f"{tokenizer.vocab_size}; put the run's own back, or use a new --workdir."
        )


def _how_measured(config: Config) -> dict[str, Any]:
    """What the scores depend on by which checkpoints are compared, if those are of translations."""
    if config.train.best_metric in ("loss", "accuracy"):
        return {}
    decode = {f"decode.{name}": value for name, value in dataclasses.asdict(config.decode).items()}
    return decode | {"decode.tokens_per_batch": None, "train.decode_examples": config.train.decode_examples}


def _check_identity(
    record: dict[str, Any] | None,
    identity: dict[str, Any],
    paths: workdir_lib.Workdir,
    config: Config,
    scores: dict[int, float],
) -> None:
    """Refuses a checkpoint's `record`, if there is one, that was made from anything else.

    Where training goes on, its `scores` must have come as those to come will.
    """
    if record is None:
        return
    goes_on = record["step"] < config.train.num_steps and not early_stop(scores, config.train.patience)
    for name, old in record.get("measured", {}).items() if goes_on and scores else ():
        if (new := identity["measured"].get(name, old)) != old:
            raise ValueError(
                f"config.{name}: up to step {record['step']} validation was measured with {old!r}, and "
                f"train.best_metric={config.train.best_metric!r} would be compared with what {new!r} gives; leave it "
                "as it was until training has ended, or use a new --workdir."
            )
    changed = own_text.changed(record.get("files", {}), identity["files"])
    named = {"tokenizer": paths.tokenizer, "files": ", ".join(changed), "data": "the dataset or its order"}
    for name, what in named.items():
        if record.get(name, {}) != identity[name]:
            raise ValueError(
                f"{what}: not what the run in {paths.path} was trained with up to step {record['step']}; "
                "put the old one back, or use a new --workdir."
            )


def _known_scores(record: dict[str, Any], paths: workdir_lib.Workdir, metric: str) -> dict[int, float]:
    """Scores of all evaluations up to the checkpoint of `record`: those it holds, and those logged after it."""
    logged = writers.validation_scores(paths.metrics, lambda values: metrics.score(values, metric))
    saved = {int(step): score for step, score in record["scores"].items()}
    return saved | {step: score for step, score in logged.items() if step <= record["step"]}


def _is_finished(paths: workdir_lib.Workdir, config: Config, done: int, scores: dict[int, float]) -> bool:
    """Whether training has come to its end and the last thing logged is its test line."""
    trained = done >= config.train.num_steps or early_stop(scores, config.train.patience)
    logged = writers.read_metrics(paths.metrics)
    return trained and bool(logged) and logged[-1]["split"] == "test"


def _check_finite(step: int, values: dict[str, float], checkpoints: checkpoint.Checkpoints) -> None:
    if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
        kept = checkpoints.steps()
        raise Diverged(
            f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}: training has diverged. "
            f"The newest checkpoint is {f'of step {kept[-1]}' if kept else 'none yet'}. Try, in a new --workdir, "
            "a lower optim.learning_rate, more optim.warmup_steps, optim.clip_norm=1.0, or model.norm_placement='pre'."
        )
