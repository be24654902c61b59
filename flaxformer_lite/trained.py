"""A trained model from its workdir, whatever its shape."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np

from flaxformer_lite import config as config_lib
from flaxformer_lite.config import Config, DataConfig, parse_average, with_vocabulary
from flaxformer_lite.data.tokens import tokenizer as tokenizer_lib
from flaxformer_lite.data.tokens.tokenizer import MarianTokenizer, Tokenizer
from flaxformer_lite.decoding.decoder import Decoder
from flaxformer_lite.fields import OWN_TEXT
from flaxformer_lite.model import transformer
from flaxformer_lite.model.ensemble import Ensemble
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import place
from flaxformer_lite.training import checkpoint, metrics, parallel, sharding
from flaxformer_lite.training.checkpoint import Checkpoints

ROWS = 64  # texts classified at once
PARTS = {"raw": "params", "ema": "ema"}  # which parameters, and the part of a checkpoint that holds them

# What the models of an ensemble have in common, as a run that differs is told; what a run does not tell is None.
COMMON = {
    "another model.architecture": lambda run: run.config.model.architecture,
    "another model.decoder": lambda run: run.config.model.decoder,
    "another tokenizer": lambda run: run.tokenizer.fingerprint,
    "other labels": lambda run: run.label_names,
    "another source language": lambda run: source_language(run.config),
}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Which parameters of a run these are."""

    steps: tuple[int, ...]  # of the checkpoints that they are the average of; mostly one
    kind: str = "raw"  # or 'ema': the moving average that training keeps
    average: str | None = None  # 'last:5', where that was asked for
    others: tuple[str, ...] = ()  # of an ensemble whose first these are: what else decides, each run and its origin

    @property
    def step(self) -> int:
        """The step that their scores are noted at."""
        return self.steps[-1]

    def __str__(self) -> str:
        steps = ", ".join(map(str, self.steps))
        words = f"average of steps {steps}" if len(self.steps) > 1 else f"step {steps}"
        if self.kind != "raw":
            words += f", moving average{'s' if len(self.steps) > 1 else ''}"
        return f"{words}; together with {'; '.join(self.others)}" if self.others else words

    @property
    def remark(self) -> str | None:
        """What the log says beside their scores; None of those of one step without an average: the best."""
        return None if self == Origin(self.steps[-1:]) else str(self)

    @property
    def label(self) -> str:
        """The same in the name of a file, such as 'step48-last5-ema'; of an ensemble, with a digest of the others."""
        parts = [f"step{self.step}"]
        if self.average:
            parts.append(self.average.replace(":", ""))
        if self.kind != "raw":
            parts.append(self.kind)
        if self.others:
            parts.append(f"ensemble{1 + len(self.others)}")
            parts.append(hashlib.sha256("\n".join(self.others).encode()).hexdigest()[:8])
        return "-".join(parts)


@dataclasses.dataclass(frozen=True)
class Trained:
    """The best model of a run, or of several that decide together, as it lies on `mesh`."""

    config: Config
    tokenizer: Tokenizer | MarianTokenizer
    model: nn.Module
    params: dict
    mesh: jax.sharding.Mesh
    label_names: list[str] | None  # of a classifier's classes
    origin: Origin = Origin(steps=(0,))
    record: Mapping[str, object] = dataclasses.field(default_factory=dict)  # of the checkpoint: what it depends on

    @property
    def longest(self) -> int:
        """Most tokens of a text, beside its start and end symbols."""
        model = self.config.model
        return model.max_length - (2 if model.architecture == "encoder_classifier" else 1)

    def encode(
        self,
        texts: Sequence[str],
        *,
        name: str = "text",
        numbers: Sequence[int] | None = None,
        advice: str = "split it into shorter sentences",
        side: str = "source",
    ) -> list[np.ndarray]:
        """One array of ids a text.

        Args:
          name, numbers, advice: what an error calls a text, and what to do about it.
          side: 'source', or 'target': whose language the texts are in.

        Raises:
          InputError: a text has more tokens than the model takes; it is named by its number, counted from 1.
        """
        rows = self.tokenizer.encode(texts, side=side)
        for number, text, ids in zip(numbers or range(1, len(texts) + 1), texts, rows, strict=True):
            if len(ids) > self.longest:
                raise InputError(
                    f"{name} {number}: {len(ids)} tokens, and the model takes at most {self.longest}; "
                    f"{advice}. It begins: {text[:60]!r}"
                )
        return rows

    def fits(self, text: str) -> bool:
        """Whether the model takes this text."""
        return len(self.tokenizer.encode([text])[0]) <= self.longest

    def asked(self) -> dict[str, object]:
        """What answers depend on, by the names that users know: the model, and how it writes."""
        decode = {f"--{name}": value for name, value in dataclasses.asdict(self.config.decode).items()}
        origin = dataclasses.replace(self.origin, others=())  # the others are in the fingerprint, wherever they lie
        model = f"{origin}, parameters {self.fingerprint()[:16]}"
        return {"model": model} | (decode if self.config.model.architecture != "encoder_classifier" else {})

    def fingerprint(self) -> str:
        """SHA-256 of the model's settings, its parameters and the tokenizer, wherever the run lies."""
        settings = self.model.configs if isinstance(self.model, Ensemble) else self.config.model
        digest = hashlib.sha256(f"{settings} {self.tokenizer.fingerprint}".encode())
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            digest.update(jax.tree_util.keystr(path).encode())
            digest.update(np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()


def load(
    workdir: str | Path,
    *,
    command: str | None = None,
    architecture: str | None = None,
    average: str | None = None,
    parameters: str | None = None,
    ensemble: str | Path | Sequence[str | Path] = (),
    tensor: int = 1,
) -> Trained:
    """The best model of a finished or half-finished run; without an evaluation yet, the newest.

    Args:
      command, architecture: what the model is wanted for, and the shape that this needs.
      average: 'last:5' or 'best:5' checkpoints, or 'none'; None: as the run's `train.average` says, or of as many of
        them as there are so far.
      parameters: 'raw', or 'ema', their moving average; None: 'ema' if the run keeps one.
      ensemble: other runs whose models decide together with this one's, chosen in the same way; see `together`.
      tensor: so many devices hold a model between them, as `parallel.tensor` splits it in training; with 1 each holds
        all of it. Texts are shared out between as many such groups as there are.

    Raises:
      InputError: the folder holds no run, or no checkpoint that can be read, or a model of another shape; fewer
        checkpoints are kept than are to be averaged, or the run keeps no moving average; or models that cannot decide
        together; or `tensor` devices cannot share a model, or are not there.
    """
    options = {"command": command, "architecture": architecture, "average": average, "parameters": parameters}
    run = _load(workdir, tensor=tensor, **options)
    runs = {str(workdir): run}
    for other in map(str, [ensemble] if isinstance(ensemble, str | os.PathLike) else ensemble):
        if other in runs:
            raise InputError(f"ensemble: {other} is named twice, and would count twice; leave it out.")
        try:
            runs[other] = _load(other, mesh=run.mesh, **options)
        except InputError as error:
            raise InputError(str(error), where="ensemble" if error.where == other else f"ensemble: {other}") from error
    return together(runs) if len(runs) > 1 else run


def together(runs: Mapping[str, Trained]) -> Trained:
    """The models of several runs as one, which gives the mean of their probabilities, and all else as the first.

    Args:
      runs: by the name of each; all on the same mesh.

    Raises:
      InputError: they do not write the same tokens one by one, or do not tell the same classes; or two are the same.
    """
    (name, first), *others = runs.items()
    for other, run in others:
        for what, of_run in COMMON.items():
            if None not in (of_run(run), of_run(first)) and of_run(run) != of_run(first):
                raise InputError(
                    f"ensemble: {other} has {what} than {name}; only models that give probabilities of the same "
                    "things can decide together: leave it out, or train it as that one was."
                )
    if first.config.model.decoder == "masked":
        raise InputError(
            f"ensemble: {name} has model.decoder='masked', and its texts are not written token by token; leave the "
            "others out."
        )
    known: dict[str, str] = {}
    for other, run in runs.items():
        if (same := known.setdefault(run.fingerprint(), other)) != other:
            raise InputError(f"ensemble: {other} is the same model as {same}, which would count twice; leave it out.")
    model = Ensemble(tuple(run.config.model for run in runs.values()))
    params = {f"members_{number}": run.params for number, run in enumerate(runs.values())}
    data = first.config.data
    buckets = tuple(sorted({min(length, model.config.max_length) for length in data.buckets}))
    config = dataclasses.replace(first.config, model=model.config, data=dataclasses.replace(data, buckets=buckets))
    origin = dataclasses.replace(first.origin, others=tuple(f"{other}, {run.origin}" for other, run in others))
    return dataclasses.replace(first, config=config, model=model, params=params, origin=origin)


def source_language(config: Config) -> str | None:
    """What a run translates from, as far as its config tells; None: it does not, or the run translates nothing."""
    data = config.data
    if config.model.architecture == "encoder_classifier":
        return None
    if data.source_language or data.languages:
        return data.source_language or data.languages[0]
    if data.dataset in OWN_TEXT:
        endings = [Path(path.rstrip("*").removesuffix(".gz")).suffix[1:] for path in data.train_files]
        return endings[0] if len(set(endings)) == 2 and all(endings) else None
    if data.tokenizer == "marian" and data.dataset == DataConfig().dataset:
        return None  # weights from elsewhere, not trained yet
    first, _, second = data.dataset.rpartition("/")[2].partition(":")[0].partition("-")
    return first if second else None


def _load(
    workdir: str | Path,
    *,
    command: str | None,
    architecture: str | None,
    average: str | None,
    parameters: str | None,
    tensor: int = 1,
    mesh: jax.sharding.Mesh | None = None,
) -> Trained:
    """`load` of one run; `mesh`: None: over as many devices as its batches allow, `tensor` for each part of them."""
    paths = workdir_lib.Workdir(place(workdir))
    config = workdir_lib.read_config(paths.path)
    if architecture not in (None, config.model.architecture):
        raise InputError(
            f"{workdir}: {command} needs a run with model.architecture={architecture!r}, this one is "
            f"{config.model.architecture!r}."
        )
    tokenizer = tokenizer_lib.load(paths.tokenizer)
    config = with_vocabulary(config, config.data.vocab_size)
    # What computed attention then may not exist here, and is no part of what was learned.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, backend="auto"))
    model = transformer.build_model(config.model)
    shapes = param_shapes(model)
    mesh = mesh or parallel.widest_mesh(config.data.rows_multiple, tensor)
    sharding.check(shapes, mesh, section="")
    checkpoints, metric = None, config.train.best_metric
    if paths.checkpoints.is_dir():
        scores = metrics_log.validation_scores(paths.metrics, lambda values: metrics.score(values, metric))
        checkpoints = Checkpoints(paths.checkpoints, scores=scores, due=schedule(config), read_only=True)
    if checkpoints is None or not checkpoints.steps():
        raise InputError(f"{workdir}: there is no checkpoint yet; train this run first.")
    held = parallel.MeshMode(mesh).abstract(shapes)
    params, record, origin = restore(checkpoints, held, config, average=average, parameters=parameters)
    checkpoints.close()
    if record["tokenizer"] != tokenizer.fingerprint:  # so the ids of one are not the ids of the other
        raise InputError(f"{paths.tokenizer}: this is not the tokenizer that step {origin.step} was trained with.")
    return Trained(config, tokenizer, model, params, mesh, record.get("label_names"), origin, record)


def measured(config: Config) -> str:
    """Which parameters training evaluates, and commands use unless they are told otherwise: 'raw' or 'ema'."""
    return "raw" if config.train.ema_decay is None else "ema"


def schedule(config: Config) -> Callable[[int], bool]:
    """Whether a run has a checkpoint at a step."""
    train = config.train
    every = {"eval_every": train.eval_every, "checkpoint_every": train.checkpoint_every}
    return functools.partial(checkpoint.is_due, num_steps=train.num_steps, **every)


def restore(
    checkpoints: Checkpoints,
    shapes: dict,
    config: Config,
    *,
    average: str | None = None,
    parameters: str | None = None,
) -> tuple[dict, dict, Origin]:
    """The parameters that are the result of a run so far, the record that lies beside them, and which they are.

    Args:
      shapes: of the parameters, with where to put them.
      average, parameters: as `load` takes them.

    Raises:
      InputError: as `load`, about the checkpoints.
    """
    kind = parameters or measured(config)
    if kind not in PARTS:
        raise InputError(f"parameters: expected {' or '.join(PARTS)}, got {kind!r}.")
    if kind == "ema" and config.train.ema_decay is None:
        raise InputError("parameters: this run keeps no moving average, its train.ema_decay is not set; use 'raw'.")
    or_fewer, part = average is None, PARTS[kind]
    average = {None: config.train.average, "none": None}.get(average, average)
    steps = [] if average is None else checkpoints.steps_of(*parse_average("average", average), or_fewer=or_fewer)
    if not steps:
        steps, average = [checkpoints.best_step()], None
    if steps == [0]:  # their moving average is what it is of, before the first step
        part = "params"
    parts, record = checkpoints.restore_average(steps, {part: shapes})
    return parts[part], record, Origin(tuple(steps), kind, average)


def with_decode(run: Trained, decode: Mapping[str, object]) -> Trained:
    """`run` with some fields of `DecodeConfig` in place of its own.

    Raises:
      InputError: there is no such field, or its value is wrong.
    """
    fields = config_lib.to_dict(run.config)
    own = fields["decode"]
    if decode.get("method", own["method"]) != own["method"]:  # then what the run says of its own is of no use
        own = {name: value for name, value in own.items() if f"decode.{name}" not in config_lib.READ_IF}
    return dataclasses.replace(run, config=config_lib.resolve({**fields, "decode": {**own, **decode}}))


def make_decoder(model: nn.Module, config: Config, mesh: jax.sharding.Mesh, **options) -> Decoder:
    """A `Decoder` that splits its batches over the devices of `mesh`."""
    layout = parallel.decoding_shardings(mesh)
    return Decoder(model, config.decode, rows_multiple=mesh.size, sharding=layout, **options)
