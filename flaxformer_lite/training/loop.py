"""The training loop: steps, and between them metrics, checkpoints and evaluations."""

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_lite.data.batches import loader
from flaxformer_lite.data.split import Data
from flaxformer_lite.fields import Config
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.system import accelerators
from flaxformer_lite.training import (
    evaluations,
    flops,
    meshes,
    metrics,
    parallel,
    profile,
    run_report,
    schedules,
)
from flaxformer_lite.training.checkpoint import Checkpoints
from flaxformer_lite.training.compilation import CompiledSteps
from flaxformer_lite.training.interrupt import Interrupt, Interrupted, StopTogether
from flaxformer_lite.training.meter import Meter
from flaxformer_lite.training.progress import Progress
from flaxformer_lite.training.state import TrainState, to_parts


class Diverged(Exception):
    """The loss or the gradient is no longer finite."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A start of a run: the objects that exist before its first step."""

    config: Config  # with the sizes of the vocabulary and the classes
    paths: Workdir
    mode: parallel.MeshMode | parallel.PmapMode
    interrupt: Interrupt
    initial_state: Callable[..., TrainState]  # of random parameters, or of `params`
    abstract_state: TrainState  # shapes and types
    steps: CompiledSteps
    checkpoints: Checkpoints
    scores: dict[int, float]  # of each evaluated step, higher is better; grows during the run
    started: float  # time.monotonic() of this start
    has_config: bool  # an earlier start has saved its config
    same_result: bool  # this config would not change the result of a finished run


@dataclasses.dataclass(frozen=True)
class Start:
    """The starting point of a run: its newest checkpoint, or step 0."""

    step: int
    parts: dict[str, Any] | None  # the arrays of the checkpoint; None without one
    record: dict[str, Any]  # its JSON part
    imported: bool  # step 0 has imported weights, without optimizer state


class Evaluated(NamedTuple):
    """The result of evaluating a state on validation data."""

    values: dict[str, float]
    samples: str  # generated texts, for a person to read
    remark: str | None  # `parameters` of the log line; None: the raw parameters of the step


class Trainer:
    """Trains one state of a run.

    Attributes:
      state: the newest state.
      done: its number of updates.
    """

    def __init__(
        self,
        run: Run,
        start: Start,
        state: TrainState,
        data: Data,
        *,
        facts: dict[str, Any],
        evaluate: Callable[[int, TrainState], Evaluated],
        stop: StopTogether,
    ):
        """
        Args:
          facts: the fingerprints of the data for every checkpoint, see `identity.of`.
          evaluate: evaluates a state on validation data, given its number of updates.
          stop: raises Interrupted once any process has received a signal.
        """
        config = run.config
        self.run, self.data, self.state, self.done = run, data, state, start.step
        self._facts, self._evaluate, self._stop = facts, evaluate, stop
        is_primary = jax.process_index() == 0
        self.writer = metrics_log.MetricsWriter(
            run.paths.logs, started=run.started, enabled=is_primary, publish=run.paths.publish_logs
        )
        self._progress = Progress(start.step, config.train.num_steps, enabled=is_primary)
        self.meter = Meter(
            "examples" if config.model.architecture == "encoder_classifier" else "tokens",
            peak=accelerators.peak(run.mode.mesh.devices.flat),
            elapsed=self.writer.elapsed,
            useful=start.record.get("useful_seconds", 0.0),
        )
        self._rates = _learning_rates(config)
        self._unread: tuple[int, Any] | None = None  # the last step and its metrics, on the devices

    def train(self) -> None:
        """Trains to the end; on a signal, saves the state and raises Interrupted."""
        run, config = self.run, self.run.config
        part = meshes.rows_of_process(run.mode.mesh)
        batches = self.data.train.batches(num_steps=config.train.num_steps, part=part)
        try:
            if evaluations.is_due(self.done, config) and self.done not in run.scores:
                self.evaluate()
            params = run.abstract_state.params
            run_report.say(run_report.resolved(config, self.data, run.mode.mesh, params))
            splits = {"train": self.data.train, "validation": self.data.validation}
            run_report.say_unknown(splits, self.data.tokenizer)
            if table := run_report.groups(config, params):
                run_report.say(table)
            for batch in self._on_devices(batches):
                if evaluations.early_stop(run.scores, config.train.patience):
                    break
                self._one_step(batch)
                self._stop.soon()
        except jax.errors.JaxRuntimeError as error:
            raise run.steps.explained(error) from None
        except Interrupted as reason:
            if reason.agreed:
                self._save_at_signal()
            raise
        finally:
            self._progress.close()
            try:
                self.writer.flush()
            finally:  # a log that cannot be flushed does not cost the last checkpoint
                run.checkpoints.wait()
        if batches.sampled:
            run_report.say(run_report.subword_sampling(batches))

    def _on_devices(self, batches: loader.Batches) -> Iterator[Any]:
        """Starts the meter, and returns an iterator of the batches from the first step on."""
        run = self.run
        stream = loader.stream(batches, run.mode.put_batch, first_step=self.done)
        stream = self.meter.waiting_for(stream, lambda: self._unread and self._unread[1])
        if run.config.train.profile and jax.process_index() == 0:
            stream = profile.traced(
                stream,
                run.paths.profile,
                programs=run.steps.futures,
                wait=lambda: jax.block_until_ready(self.state),
                show=self._progress.note,
            )
        self.meter.restart()
        return stream

    def _one_step(self, batch: Any) -> None:
        """Runs an update, and the checkpoint and evaluation that are due after it."""
        with self.meter.paused():
            run_step = self.run.steps.get(self.data.train.plan.shape(self.done))
        self.state, sums = run_step(self.state, batch)
        self.done += 1
        # Reading the metrics of the previous step only now keeps the devices busy with this step.
        self._read_metrics()
        self._unread = (self.done, sums)
        if self.run.checkpoints.due(self.done):
            self._read_metrics()
            with self.meter.paused():
                self.save()
        if evaluations.is_due(self.done, self.run.config):
            with self.meter.paused():
                self.evaluate()

    def _read_metrics(self) -> None:
        """Waits for the metrics of the last step; checks, shows and logs them."""
        if self._unread is None:
            return
        done, sums = self._unread
        self._unread = None
        sums, config = self.run.mode.read(sums), self.run.config
        values = metrics.divide(sums)
        _check_finite(done, values, config, self.run.checkpoints)
        work = flops.train_examples(config, *self.data.train.lengths(done - 1))
        self.meter.add(float(sums["loss"][1]), work)
        rate, values["learning_rate"] = self.meter.rate(), float(self._rates[done - 1])
        shown = {
            "loss": values["loss"],
            "lr": values["learning_rate"],
            f"{self.meter.unit}/s": rate,
        }
        self._progress.update(done, shown)
        if done % config.train.log_every == 0 or evaluations.is_due(done, config):
            self.writer.write(done, "train", values | self.meter.line())

    def save(self) -> None:
        """Publishes the log, and saves a checkpoint of the state."""
        scores = {str(step): score for step, score in self.run.scores.items()}
        known = {
            "label_names": self.data.label_names,
            "scores": scores,
            "useful_seconds": self.meter.useful,
        }
        self.writer.flush()
        parts = to_parts(self.run.mode.over_mesh(self.state))
        self.run.checkpoints.save(self.done, parts, {"step": self.done, **self._facts, **known})

    def _save_at_signal(self) -> None:
        self._read_metrics()
        self.save()
        self.run.checkpoints.wait()
        workdir = shlex.quote(f"--workdir={self.run.paths.path}")
        resume = f"to resume: the same command with {workdir}"
        run_report.say(f"stopped after step {self.done} and saved; {resume}")

    def evaluate(self) -> None:
        """Evaluates the state on validation data; logs the values, and shows samples."""
        run = self.run
        values, samples, remark = self._evaluate(self.done, self.state)
        if jax.process_index() == 0 and samples:
            run.paths.write_sample(f"{self.done}.txt", samples)
            self._progress.note("\n".join(samples.splitlines()[:8]))
        self.writer.write(self.done, "validation", values, parameters=remark)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._progress.note(f"step {self.done}  validation  {shown}")
        run.scores[self.done] = metrics.score(values, run.config.train.best_metric)


def _learning_rates(config: Config) -> np.ndarray:
    """Returns the learning rate of each step, from step 1; (num_steps,)."""
    steps = np.arange(1, config.train.num_steps + 1)
    d_model, num_steps = config.model.d_model, config.train.num_steps
    rates = schedules.learning_rate(steps, config.optim, d_model=d_model, num_steps=num_steps)
    return jax.device_get(rates)


def _check_finite(
    done: int, values: dict[str, float], config: Config, checkpoints: Checkpoints
) -> None:
    """Raises Diverged after more than `optim.nan_tolerance` steps in a row that are not finite.

    Removes the number of these steps from `values`.
    """
    in_a_row, tolerance = values.pop("non_finite", math.inf), config.optim.nan_tolerance
    is_finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
    if not is_finite and in_a_row > tolerance:
        kept = checkpoints.steps()
        newest = f"of step {kept[-1]}" if kept else "none yet"
        tolerated = f" after {tolerance} skipped ones (optim.nan_tolerance)" if tolerance else ""
        raise Diverged(
            f"step {done}: loss {values['loss']}, gradient norm {values['grad_norm']}{tolerated}: "
            f"training has diverged. The newest checkpoint is {newest}. Try, in a new --workdir, a "
            "lower optim.learning_rate, more optim.warmup_steps, optim.clip_norm=1.0, or "
            "model.norm_placement='pre'."
        )
