"""Loads the trained model of a run, of any architecture, or several runs as an ensemble."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import flax.linen as nn
import jax
import numpy as np

from flaxformer_lite import config as config_lib
from flaxformer_lite.checks.vocabularies import vocabulary_sizes
from flaxformer_lite.config import with_vocabulary
from flaxformer_lite.data.tokens import tokenizer as tokenizer_lib
from flaxformer_lite.data.tokens import two_vocabularies
from flaxformer_lite.data.tokens.forbidden import forbidden_ids
from flaxformer_lite.data.tokens.tokenizer import AnyTokenizer
from flaxformer_lite.decoding.decoder import Decoder
from flaxformer_lite.fields import Config
from flaxformer_lite.model import transformer
from flaxformer_lite.model.ensemble import Ensemble
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.system import given
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import place
from flaxformer_lite.training import meshes, metrics, origin, parallel, sharding
from flaxformer_lite.training.checkpoint import Checkpoints
from flaxformer_lite.training.origin import Origin

# The properties that members of an ensemble share, by the words of the error message. None is
# compatible with every value.
COMMON: "dict[str, Callable[[Trained], object]]" = {
    "another model.architecture": lambda run: run.config.model.architecture,
    "another model.decoder": lambda run: run.config.model.decoder,
    "another tokenizer": lambda run: run.tokenizer.fingerprint,
    "another data.normalization": lambda run: config_lib.source_normalization(run.config),
    "other labels": lambda run: run.label_names,
    "another source language": lambda run: config_lib.source_language(run.config),
}


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of `load` that choose the model of a run."""

    average: str | None
    parameters: str | None
    ensemble: str | Path | Sequence[str | Path]
    tensor: int


class DecodeOptions(TypedDict, total=False):
    """Fields of `DecodeConfig` as keyword arguments."""

    method: str
    beam_size: int
    alpha: float
    penalty: str
    beam_groups: int
    diversity: float
    iterations: int
    length_candidates: int
    temperature: float
    top_k: int | None
    top_p: float | None
    epsilon: float
    seed: int
    max_extra_length: int
    min_length: int
    no_repeat_ngram: int | None
    forbidden: tuple[str, ...]
    tokens_per_batch: int


@dataclasses.dataclass(frozen=True)
class Trained:
    """The best model of a run, or an ensemble of several, on the devices of `mesh`."""

    config: Config
    tokenizer: AnyTokenizer
    model: nn.Module
    params: Params
    mesh: jax.sharding.Mesh
    label_names: list[str] | None  # the names of a classifier's classes
    origin: Origin = dataclasses.field(default_factory=lambda: Origin(steps=(0,)))
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the checkpoint
    folder: Path | None = None  # the workdir

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a text, without its start and end symbols."""
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
        """Returns an array of ids for each text.

        Args:
          name, numbers: the name and the number of a text in error messages; by default its number,
            counted from 1.
          advice: what the error message suggests.
          side: 'source' or 'target': the language of the texts.

        Raises:
          InputError: a text has more tokens than the model takes.
        """
        rows = self.tokenizer.encode(texts, side=side)
        for number, text, ids in zip(numbers or range(1, len(texts) + 1), texts, rows, strict=True):
            if len(ids) > self.longest:
                raise InputError(
                    f"{name} {number}: {len(ids)} tokens, and the model takes at most "
                    f"{self.longest}; {advice}. It starts: {text[:60]!r}"
                )
        return rows

    def fits(self, text: str) -> bool:
        """Whether the text is short enough for the model."""
        return len(self.tokenizer.encode([text])[0]) <= self.longest

    def asked(self) -> dict[str, object]:
        """Returns the settings that determine the answers: the model, and the decoding flags."""
        # The fingerprint covers the other members of an ensemble, independent of their folders.
        alone = dataclasses.replace(self.origin, others=())
        model: dict[str, object] = {"model": f"{alone}, parameters {self.fingerprint()[:16]}"}
        if self.config.model.architecture == "encoder_classifier":
            return model
        decode = dataclasses.asdict(self.config.decode)
        # Records of earlier versions lack these fields, which had no effect.
        later = {name for name in ("epsilon", "forbidden") if not decode[name]}
        if decode["method"] != "diverse_beam":
            later |= {"beam_groups", "diversity"}
        return model | {f"--{name}": value for name, value in decode.items() if name not in later}

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the model's settings, its parameters and the tokenizer."""
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
    """Returns the best model of a run, finished or not; the newest if none is evaluated yet.

    Args:
      command, architecture: the command that needs the model, and the architecture it requires;
        None: any.
      average: 'last:5' or 'best:5' checkpoints, or 'none'; None: `train.average` of the run, or an
        average of fewer checkpoints while there are fewer.
      parameters: 'raw' or 'ema', their moving average; None: 'ema' if the run keeps one.
      ensemble: other runs whose models form an ensemble with this one, see `together`; the other
        options apply to each of them.
      tensor: the number of devices that each model is sharded over, as by `parallel.tensor` in
        training. Batches are split over the groups of `tensor` devices.

    Raises:
      InputError: the folder contains no run, no readable checkpoint or a model of another
        architecture; there are too few checkpoints to average, or the run keeps no moving average;
        the models cannot form an ensemble; or `tensor` devices do not exist or cannot share a
        model.
    """
    load_run = functools.partial(
        _load,
        command=command,
        architecture=architecture,
        average=average,
        parameters=parameters,
    )
    origin.check(average, parameters)
    tensor = given.whole_number(tensor, name="tensor")
    others = given.folders(ensemble, name="ensemble")
    workdir = given.folder(workdir, name="workdir")
    run = load_run(workdir, tensor=tensor)
    runs = {workdir: run}
    for other in others:
        if other in runs:
            raise InputError(
                f"ensemble: {other} is named 2 times, and would count 2 times; leave it out."
            )
        try:
            runs[other] = load_run(other, mesh=run.mesh)
        except InputError as error:
            where = "ensemble" if str(error).startswith(f"{other}:") else f"ensemble: {other}"
            raise InputError(str(error), where=where) from error
    return together(runs) if len(runs) > 1 else run


def together(runs: Mapping[str, Trained]) -> Trained:
    """Returns an ensemble that predicts the mean probabilities of its members.

    Everything else is as in the first run.

    Args:
      runs: the members by name; all on the same mesh.

    Raises:
      InputError: the members differ in their tokens or classes, do not generate token by token, or
        two of them are the same model.
    """
    (name, first), *others = runs.items()
    for other, run in others:
        for what, of_run in COMMON.items():
            if None not in (of_run(run), of_run(first)) and of_run(run) != of_run(first):
                raise InputError(
                    f"ensemble: {other} has {what} than {name}; only models that give "
                    "probabilities of the same things can decide together: leave it out, or train "
                    "it as that one was."
                )
    if first.config.model.decoder == "masked":
        raise InputError(
            f"ensemble: {name} has model.decoder='masked', and its texts are not written token "
            "by token; leave the others out."
        )
    known: dict[str, str] = {}
    for other, run in runs.items():
        if (same := known.setdefault(run.fingerprint(), other)) != other:
            raise InputError(
                f"ensemble: {other} is the same model as {same}, which would count 2 times; leave "
                "it out."
            )
    model = Ensemble(tuple(run.config.model for run in runs.values()))
    params = {f"members_{number}": run.params for number, run in enumerate(runs.values())}
    data = first.config.data
    buckets = tuple(sorted({min(length, model.config.max_length) for length in data.buckets}))
    windows = None if data.windows is None else min(data.windows, model.config.max_length)
    data = dataclasses.replace(data, buckets=buckets, windows=windows)
    config = dataclasses.replace(first.config, model=model.config, data=data)
    members = tuple(f"{other}, {run.origin}" for other, run in others)
    with_others = dataclasses.replace(first.origin, others=members)
    return dataclasses.replace(first, config=config, model=model, params=params, origin=with_others)


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
    """Returns the model of one run, see `load`.

    Args:
      mesh: None: the largest number of devices that its batches allow, in groups of `tensor`.
    """
    paths = workdir_lib.Workdir(place(workdir))
    config = workdir_lib.read_config(paths.path)
    if architecture not in (None, config.model.architecture):
        raise InputError(
            f"{command} needs a run with model.architecture={architecture!r}, this one is "
            f"{config.model.architecture!r}.",
            where=str(workdir),
        )
    tokenizer = tokenizer_lib.load(paths.tokenizer, config_lib.source_normalization(config))
    config = with_vocabulary(config, *vocabulary_sizes(config, two_vocabularies.sizes(tokenizer)))
    # The backend of the training may not exist here; it does not change the model.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, backend="auto"))
    model = transformer.build_model(config.model)
    shapes = param_shapes(model)
    mesh = mesh or meshes.widest_mesh(config.data.rows_multiple, tensor)
    sharding.check(shapes, mesh, section="")
    checkpoints, metric = None, config.train.best_metric
    if paths.checkpoints.is_dir():
        scores = metrics_log.validation_scores(
            paths.metrics, lambda values: metrics.score(values, metric)
        )
        due = origin.schedule(config)
        checkpoints = Checkpoints(paths.checkpoints, scores=scores, due=due, read_only=True)
    if checkpoints is None or not checkpoints.steps():
        raise InputError("there is no checkpoint yet; train this run first.", where=str(workdir))
    sharded = parallel.MeshMode(mesh).abstract(shapes)
    params, record, found = origin.restore(
        checkpoints, sharded, config, average=average, parameters=parameters
    )
    checkpoints.close()
    if record["tokenizer"] != tokenizer.fingerprint:
        raise InputError(
            f"{paths.tokenizer}: this is not the tokenizer that step {found.step} was trained with."
        )
    names = record.get("label_names")
    return Trained(config, tokenizer, model, params, mesh, names, found, record, paths.path)


def with_decode(run: Trained, decode: Mapping[str, object]) -> Trained:
    """Returns `run` with the fields `decode` of `DecodeConfig` replaced.

    Another method resets the fields that apply only to the old one.

    Raises:
      InputError: a field does not exist, or its value is wrong.
    """
    fields = config_lib.to_dict(run.config)
    own = fields["decode"]
    if decode.get("method", own["method"]) != own["method"]:
        of_methods = config_lib.READ_IF
        own = {name: value for name, value in own.items() if f"decode.{name}" not in of_methods}
    names = [f"decode.{name}" for name in decode]
    config = config_lib.resolve({**fields, "decode": {**own, **decode}}, given=names)
    return dataclasses.replace(run, config=config)


def make_decoder(
    model: nn.Module,
    config: Config,
    mesh: jax.sharding.Mesh,
    tokenizer: AnyTokenizer | None = None,
    **options: Any,
) -> Decoder:
    """Returns a `Decoder` that splits its batches over the devices of `mesh`.

    Args:
      tokenizer: is required if `config.decode.forbidden` has texts.
    """
    if config.decode.forbidden:
        assert tokenizer is not None, "forbidden texts have ids"
        options["forbidden"] = forbidden_ids(tokenizer, config.decode.forbidden)
    options = {
        "rows_multiple": mesh.size,
        "sharding": parallel.decoding_shardings(mesh),
        # In windows of whole files the start symbol is rare: only at the start of a file.
        "within_texts": config.data.windows is not None and config.data.whole_files,
        **options,
    }
    return Decoder(model, config.decode, **options)
