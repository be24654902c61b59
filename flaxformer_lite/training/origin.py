"""Which parameters of a run are used: of the best checkpoint or an average, raw or as an EMA."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

from flaxformer_lite.config import parse_average
from flaxformer_lite.fields import Config
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training.checkpoint import Checkpoints

# The kinds of parameters, and the part of a checkpoint that contains each.
PARTS = {"raw": "params", "ema": "ema"}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Identifies the parameters of a run."""

    steps: tuple[int, ...]  # of the checkpoints that are averaged; usually 1
    kind: str = "raw"  # or 'ema': the moving average that training keeps
    average: str | None = None  # the requested average, such as 'last:5'
    others: tuple[str, ...] = ()  # the other members of an ensemble: each run and its origin

    @property
    def step(self) -> int:
        """The step that is logged with their scores."""
        return self.steps[-1]

    def __str__(self) -> str:
        steps = ", ".join(map(str, self.steps))
        words = f"average of steps {steps}" if len(self.steps) > 1 else f"step {steps}"
        if self.kind != "raw":
            words += f", moving average{'s' if len(self.steps) > 1 else ''}"
        return f"{words}; together with {'; '.join(self.others)}" if self.others else words

    @property
    def remark(self) -> str | None:
        """The value of `parameters` in the log; None for the raw parameters of a single step."""
        return None if self == Origin(self.steps[-1:]) else str(self)

    @property
    def label(self) -> str:
        """The part of a file name, such as 'step48-last5-ema'.

        For an ensemble it ends with a digest of the other members.
        """
        parts = [f"step{self.step}"]
        if self.average:
            parts.append(self.average.replace(":", ""))
        if self.kind != "raw":
            parts.append(self.kind)
        if self.others:
            parts.append(f"ensemble{1 + len(self.others)}")
            parts.append(hashlib.sha256("\n".join(self.others).encode()).hexdigest()[:8])
        return "-".join(parts)


def default_kind(config: Config) -> str:
    """Returns the kind of parameters that training evaluates and commands use: 'raw' or 'ema'."""
    return "raw" if config.train.ema_decay is None else "ema"


def schedule(config: Config) -> Callable[[int], bool]:
    """Returns a function of a step: whether a checkpoint is due at it.

    A signal may save one at any other step.
    """
    train = config.train

    def due(step: int) -> bool:
        regular = step % train.eval_every == 0 or step % train.checkpoint_every == 0
        return step > 0 and (regular or step == train.num_steps)

    return due


def check(average: str | None, parameters: str | None) -> None:
    """Raises InputError if one of these arguments of `restore` has another type or form."""
    if average is not None and average != "none":
        parse_average("average", average)
    if parameters not in (None, *PARTS):
        raise InputError(f"parameters: expected {' or '.join(PARTS)}, got {parameters!r}.")


def restore(
    checkpoints: Checkpoints,
    shapes: dict[str, Any],
    config: Config,
    *,
    average: str | None = None,
    parameters: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any], Origin]:
    """Returns the parameters that are the result of a run so far, their record and their origin.

    Args:
      shapes: the abstract parameters, with shardings.
      average: 'last:5' or 'best:5' checkpoints, or 'none'; None: `train.average` of the run, or an
        average of fewer checkpoints while there are fewer.
      parameters: 'raw' or 'ema'; None: 'ema' if the run keeps a moving average.

    Raises:
      InputError: there are too few checkpoints, the run keeps no moving average, or a checkpoint is
        damaged.
    """
    check(average, parameters)
    kind = default_kind(config) if parameters is None else parameters
    if kind == "ema" and config.train.ema_decay is None:
        raise InputError(
            "parameters: this run keeps no moving average, its train.ema_decay is not set; use "
            "'raw'."
        )
    or_fewer, part = average is None, PARTS[kind]
    average = config.train.average if average is None else None if average == "none" else average
    steps: list[int] = []
    if average is not None:
        steps = checkpoints.steps_of(*parse_average("average", average), or_fewer=or_fewer)
    if not steps:
        best = checkpoints.best_step()
        assert best is not None, "there is a checkpoint"
        steps, average = [best], None
    if steps == [0]:  # imported weights; their moving average equals them
        part = "params"
    parts, record = checkpoints.restore_average(steps, {part: shapes})
    return parts[part], record, Origin(tuple(steps), kind, average)
