"""`fit` trains a model, in phases: check, set up, find the start, prepare, train, finish."""

import contextlib
import dataclasses
import functools
import json
import math
import time
from pathlib import Path

import jax
from jax.sharding import Mesh

from flaxformer_lite.checks.vocabularies import (
    expected_vocabularies,
    follow_tokenizers,
    vocabulary_sizes,
)
from flaxformer_lite.config import (
    Config,
    source_normalization,
    with_classes,
    with_vocabulary,
)
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.batches import loader
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.data.tokens import tokenizer, two_vocabularies
from flaxformer_lite.data.tokens.tokenizer import AnyTokenizer
from flaxformer_lite.evaluator import Evaluator
from flaxformer_lite.model import transformer
from flaxformer_lite.runs import metrics_log, multihost, snapshot
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.system import storage
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import (
    evaluations,
    identity,
    meshes,
    origin,
    parallel,
    parent,
    run_report,
    saved_evaluation,
    sharding,
    step,
)
from flaxformer_lite.training.checkpoint import Checkpoints
from flaxformer_lite.training.compilation import CompiledSteps
from flaxformer_lite.training.interrupt import Background, Interrupt, Interrupted, StopTogether
from flaxformer_lite.training.loop import Evaluated, Run, Start, Trainer
from flaxformer_lite.training.state import TrainState, from_parts, to_parts


def fit(config: Config, workdir: Path) -> int:
    """Trains a model in `workdir`, and evaluates the best parameters on the test split.

    Training resumes from the newest checkpoint, if there is one.

    Returns:
      0 if training is complete; 143 or 130 if SIGTERM or SIGINT stopped it, with everything saved.

    Raises:
      InputError: the config, the data, the devices or the workdir do not fit together.
      Diverged: the loss or gradient is no longer finite; the earlier checkpoints are kept.
    """
    config, mesh, dataset, inherited = check(config, workdir)
    is_primary = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        multihost.together(
            lambda: stack.enter_context(workdir_lib.exclusive(workdir)) if is_primary else None
        )
        # Before it was locked, another training may have changed it.
        multihost.together(lambda: workdir_lib.check(workdir, config))
        stack.enter_context(
            snapshot.untouched_if_refused(workdir) if is_primary else contextlib.nullcontext()
        )
        interrupt, background = stack.enter_context(Interrupt()), stack.enter_context(Background())
        try:
            place = storage.place(workdir)
            _train(*set_up(config, place, mesh, dataset, inherited, interrupt, background), dataset)
        except Interrupted as reason:
            if not reason.agreed:
                return interrupt.exit_code
        # The other processes would report an early exit of process 0 as a failure.
        multihost.barrier("the run has ended")
        return interrupt.exit_code


def _train(run: Run, inherited: parent.Inherited, dataset: Dataset) -> None:
    """Runs the phases after the set-up.

    Raises:
      Interrupted: a signal stopped the run; everything is saved.
    """
    start = find_start(run)
    if run.same_result and is_finished(run, start):
        run.checkpoints.close()
        table = run_report.closing_table(run.paths.metrics)
        run_report.say(f"{run.paths.path} is complete; nothing was trained.\n{table}")
        return
    trainer, evaluator = prepare(run, start, inherited, dataset)
    trainer.train()
    finish(trainer, evaluator, dataset)


def check(config: Config, workdir: Path) -> tuple[Config, Mesh, Dataset, parent.Inherited]:
    """Checks the config, the devices, the dataset and the workdir before anything is written.

    Returns:
      The config with the number of classes, the device mesh, the dataset, not prepared yet, and
      the run and the tokenizer that this run starts from.
    """
    multihost.check_config(config)
    config = _with_old_reading(config, workdir)
    mesh = meshes.make_mesh(config.parallel.data, config.parallel.fsdp, config.parallel.tensor)
    accumulate = config.optim.accumulate_steps
    meshes.check_rows(mesh, rows_multiple=config.data.rows_multiple, accumulate_steps=accumulate)
    beside = storage.place(workdir) if workdir_lib.has_run(workdir) else None
    dataset = multihost.together(lambda: pipeline.open_dataset(config, beside=beside))
    config = with_classes(config, dataset.label_names)
    multihost.together(lambda: workdir_lib.check(workdir, config))
    find = functools.partial(parent.inherited, config, workdir, dataset.label_names)
    return config, mesh, dataset, multihost.together(find)


def _with_old_reading(config: Config, workdir: Path) -> Config:
    """Returns the config with the normalisation and the quotes of the run, if it sets neither."""
    data, kind = config.data, source_normalization(config)
    if workdir_lib.has_run(workdir):
        old = workdir_lib.read_config(workdir).data
        kind = data.normalization or old.normalization or "none"
        if data.quoted is None and old.quoted is False:
            data = dataclasses.replace(data, quoted=False)
    return dataclasses.replace(config, data=dataclasses.replace(data, normalization=kind))


def set_up(
    config: Config,
    workdir: Path,
    mesh: Mesh,
    dataset: Dataset,
    inherited: parent.Inherited,
    interrupt: Interrupt,
    background: Background,
) -> tuple[Run, parent.Inherited]:
    """Creates the workdir, and builds model, optimizer and step, without computing anything.

    Returns:
      The start of the run; and `inherited`, unless a later look at the workdir changes it.
    """
    started = time.monotonic()
    has_config, same_result = workdir_lib.has_run(workdir), workdir_lib.same_result(workdir, config)
    paths = Workdir(workdir)
    has_tokenizer = paths.tokenizer.exists()
    multihost.barrier("the config of the last start is read")
    multihost.by_process_0(lambda: _create(workdir, config, same_result, inherited))
    multihost.check_workdir(workdir)

    if follow_tokenizers(config) and not has_tokenizer:
        train_it = functools.partial(
            pipeline.provide_tokenizer, config, dataset, paths.tokenizer, given=inherited.tokenizer
        )
        multihost.together(lambda: interrupt.wait_for(Background.once(train_it)))
    config = _with_vocabulary(config, paths)
    mode = parallel.MODES[config.parallel.mode](mesh)
    train_step, initial_state = step.of_config(
        config, axis_name=mode.axis_name, row_shards=mode.row_shards
    )
    abstract_state = jax.eval_shape(initial_state)
    sharding.check(abstract_state.params, mesh)
    steps = CompiledSteps(config, mode, train_step, abstract_state, background, interrupt.wait_for)

    scores: dict[int, float] = {}
    checkpoints = Checkpoints(
        paths.checkpoints,
        keep_newest=config.train.keep_newest,
        keep_best=config.train.keep_best,
        scores=scores,
        due=origin.schedule(config),
    )
    if not checkpoints.steps() and inherited == parent.Inherited():
        # In a bucket `check` may have found a checkpoint that was never finished.
        find = functools.partial(parent.inherited, config, workdir, dataset.label_names)
        inherited = multihost.together(find)
    run = Run(
        config=config,
        paths=paths,
        mode=mode,
        interrupt=interrupt,
        initial_state=initial_state,
        abstract_state=abstract_state,
        steps=steps,
        checkpoints=checkpoints,
        scores=scores,
        started=started,
        has_config=has_config,
        same_result=same_result,
    )
    return run, inherited


def _with_vocabulary(config: Config, paths: Workdir) -> Config:
    """Returns `config` with the model's vocabulary: that of the tokenizer, unless it is fixed."""
    if not follow_tokenizers(config):
        return with_vocabulary(config, *expected_vocabularies(config))
    found = multihost.together(lambda: tokenizer.load(paths.tokenizer))
    sizes = vocabulary_sizes(config, two_vocabularies.sizes(found))
    for line in run_report.smaller_vocabularies(config, sizes):
        run_report.say(line)
    return with_vocabulary(config, *sizes)


def _create(workdir: Path, config: Config, same_result: bool, inherited: parent.Inherited) -> None:
    """Creates the workdir. If the config changes the result of a finished run, reopens its log.

    So the next start evaluates the run again, even if this one is killed early.
    """
    paths = Workdir(workdir)
    if not same_result and workdir_lib.has_run(workdir):
        try:
            paths.fetch_logs()
            metrics_log.reopen(paths.log)
        except OSError as error:
            raise InputError(
                f"{paths.log}: cannot be written: {error.strerror or error}."
            ) from error
        paths.publish_logs()
    workdir_lib.create(workdir, config)
    if inherited.parent is not None:
        storage.write_whole(paths.init, json.dumps(inherited.parent.record, indent=2) + "\n")


def find_start(run: Run) -> Start:
    """Reads the newest checkpoint, if any, and the scores of all evaluations up to it.

    Raises:
      InputError: the checkpoint is of a step after the last one of the config.
    """
    imported = workdir_lib.is_untrained(run.paths.path)
    abstract_parts = run.mode.abstract(to_parts(run.abstract_state))
    restored = None if imported else run.checkpoints.restore_newest(abstract_parts)
    if restored is None:
        return Start(0, None, {}, imported)
    parts, record = restored
    if record["step"] > run.config.train.num_steps:
        raise InputError(
            f"config.train.num_steps: the run in {run.paths.path} has done {record['step']:,} "
            f"steps, got {run.config.train.num_steps:,}; set it to that or more, or use a new "
            "--workdir."
        )
    run.scores.update(evaluations.known_scores(record, run.paths, run.config.train.best_metric))
    return Start(int(record["step"]), parts, record, imported)


def is_finished(run: Run, start: Start) -> bool:
    """Whether training has ended and the log ends with a test line."""
    logged = metrics_log.read_metrics(run.paths.metrics)
    ended = evaluations.has_ended(start.step, run.config, run.scores)
    return ended and bool(logged) and logged[-1]["split"] == "test"


def prepare(
    run: Run, start: Start, inherited: parent.Inherited, dataset: Dataset
) -> tuple[Trainer, Evaluator]:
    """Loads the data and creates the first state, while the steps compile in the background.

    Long calls run in a thread, so that the main thread notices signals.
    """
    config, mode, wait = run.config, run.mode, run.interrupt.wait_for
    fresh_state = None if start.parts else Background.once(mode.make_state, run.initial_state)
    if fresh_state and jax.process_count() > 1:
        wait(fresh_state)  # all processes must run programs in the same order
    ahead = start.step < config.train.num_steps and mode.compiles_ahead
    run.steps.start_all(
        loader.possible_shapes(config) if ahead and config.data.num_buckets is None else ()
    )
    unverified = run.has_config and not start.parts and not start.imported
    making = {"verify": unverified, "given": inherited.tokenizer}
    load = functools.partial(pipeline.load, config, dataset, run.paths.tokenizer, **making)
    data = multihost.together(lambda: wait(Background.once(load)))
    identity.check_tokenizer(data.tokenizer, config, run.paths)
    facts = identity.of(data, dataset, config)
    if start.parts:
        identity.check_resumed(start.record, facts, run.paths, config, run.scores)
    run.steps.start_all(data.train.plan.shapes() if ahead else ())
    if start.parts:
        state = mode.put_state(from_parts(start.parts))
    else:
        assert fresh_state is not None, "it is made if no checkpoint is read"
        state = wait(fresh_state)
    if start.imported:
        state = _with_imported_weights(run)
    elif inherited.parent is not None:
        state = _with_weights_of(inherited.parent, run, state, data.tokenizer)
    stop = StopTogether(run.interrupt, mode.mesh)
    evaluator = Evaluator(
        transformer.build_model(config.model),
        config,
        mode,
        data.tokenizer,
        label_names=data.label_names,
        compile_with=run.steps.get_other,
        between_batches=stop.now,
    )

    def evaluate_state(done: int, state: TrainState) -> Evaluated:
        params, count = state.measured, config.train.decode_examples
        result = evaluator.evaluate(
            params,
            mode.over_mesh(params),
            data.validation,
            decode=count,
            metric_files=run.paths.samples / saved_evaluation.METRIC_FILES,
        )
        remark = origin.Origin((done,), origin.default_kind(config)).remark
        return Evaluated(result.values, result.samples, remark)

    trainer = Trainer(run, start, state, data, facts=facts, evaluate=evaluate_state, stop=stop)
    return trainer, evaluator


def _with_imported_weights(run: Run) -> TrainState:
    """Returns the first state with the imported weights as parameters and moving average."""
    abstract = run.mode.abstract({"params": run.abstract_state.params})
    weights = run.checkpoints.restore(0, abstract)[0]["params"]
    state: TrainState = run.mode.state_with(run.initial_state, weights)
    return state


def _with_weights_of(
    source: parent.Parent, run: Run, fresh: TrainState, tokenizer: AnyTokenizer
) -> TrainState:
    """Returns the first state with the parameters of another run, and writes `init.txt`."""
    on_host = functools.partial(parallel.whole_on_host, mesh=run.mode.mesh)
    random = run.mode.over_mesh(fresh.params)
    params, table = parent.first_parameters(run.config, source, random, tokenizer, on_host=on_host)
    multihost.by_process_0(lambda: storage.write_whole(run.paths.init_table, table))
    run_report.say(run_report.first_parameters(table, run.config, run.paths))
    state: TrainState = run.mode.state_with(run.initial_state, params)
    return state


def finish(trainer: Trainer, evaluator: Evaluator, dataset: Dataset) -> None:
    """Evaluates the best parameters, or the configured average, on the test split."""
    run, config = trainer.run, trainer.run.config
    abstract_params = run.mode.abstract(run.abstract_state.params)
    params, _, used = origin.restore(run.checkpoints, abstract_params, config)
    run.checkpoints.close()
    tokenizer = trainer.data.tokenizer
    read_test = functools.partial(pipeline.read_part, dataset, "test", tokenizer, config)
    test = multihost.together(lambda: run.interrupt.wait_for(Background.once(read_test)))
    run_report.say_left_out("test", test)
    run_report.say_unknown({"test": test}, tokenizer)
    result = evaluator.evaluate(
        run.mode.put_state(params),
        params,
        test,
        metric_files=run.paths.samples / saved_evaluation.METRIC_FILES,
    )
    if run.scores and max(run.scores.values()) == -math.inf:
        run_report.say(run_report.without_best(config))
    if jax.process_index() == 0:
        paths, writer = run.paths, trainer.writer
        paths.write_sample("test.txt", result.samples)
        saved_evaluation.save(
            result, paths.samples, run=paths.path, split="test", config=config, origin=used
        )
        writer.write(used.step, "test", result.values, parameters=used.remark)
        writer.close()
        table = run_report.closing_table(paths.log)
        run_report.say("\n".join(text for text in (table, result.note) if text))
        seconds = time.monotonic() - run.started
        run_report.say(run_report.written(paths, config, seconds, trainer.meter.goodput()))
