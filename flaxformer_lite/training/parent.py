"""The run that another one starts from: its config, its tokenizer, its parameters, its origin."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_lite import config as config_lib
from flaxformer_lite.checks.vocabularies import expected_vocabularies, vocabulary_sizes
from flaxformer_lite.config import with_vocabulary
from flaxformer_lite.data.tokens import given_tokenizer, two_vocabularies
from flaxformer_lite.data.tokens import tokenizer as tokenizer_lib
from flaxformer_lite.data.tokens.extension import spellings
from flaxformer_lite.data.tokens.given_tokenizer import Given
from flaxformer_lite.data.tokens.tokenizer import AnyTokenizer, Tokenizer
from flaxformer_lite.fields import Config
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.runs import metrics_log, multihost
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import absolute, check_bucket, in_bucket, place
from flaxformer_lite.training import metrics, origin, warm_start
from flaxformer_lite.training.checkpoint import Checkpoints
from flaxformer_lite.training.sharding import name_of

EXPORT = "model.safetensors"  # in a folder of `export safetensors`


@dataclasses.dataclass(frozen=True)
class Parent:
    """A run whose parameters another one starts from, read completely."""

    config: Config
    tokenizer: AnyTokenizer
    params: dict[str, np.ndarray]  # by name
    record: dict[str, Any]  # its fingerprint: the contents of init.json
    label_names: list[str] | None  # of a classifier; None: it is none, or an export

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter."""
        return {name: x.shape for name, x in self.params.items()}


@dataclasses.dataclass(frozen=True)
class Inherited:
    """The run and the tokenizer that a run starts from."""

    parent: Parent | None = None
    tokenizer: Given | None = None  # to copy or to extend; None: a new one is trained


def read(config: Config) -> Parent:
    """Returns the run `init.run`, with the parameters that `init` chooses.

    All processes must call it.

    Raises:
      InputError: there is no such run or export, it has no such parameters, or it is damaged.
    """
    try:
        return _read(config)
    except InputError as error:
        if error.where.startswith("config."):
            raise
        message = str(error).removeprefix(f"{config.init.run}: ")
        raise InputError(f"{config.init.run}: {message}", where="config.init.run") from error


def inherited(config: Config, workdir: Path, label_names: list[str] | None) -> Inherited:
    """Returns the run and the tokenizer that a run without a checkpoint starts from, checked.

    A run with a checkpoint needs neither: both are None, and nothing is read.

    Args:
      label_names: the names of a classifier's classes.

    Raises:
      InputError: as `read` and `check`; or an earlier start in `workdir` had another parent.
    """
    _check_has_parent(config, workdir)
    if workdir_lib.has_checkpoint(workdir):
        return Inherited()
    if config.init.run is None:
        return Inherited(tokenizer=given_tokenizer.of_files(config))
    parent = read(config)
    _check_recorded(parent, config, workdir)
    found = check(config, parent)
    loads_classes = any(each.old and each.old.startswith("classes/") for each in found.values())
    if loads_classes and parent.label_names not in (None, label_names):
        raise InputError(
            f"config.init.run: the classes of {config.init.run} are {parent.label_names}, those of "
            f"the dataset are {label_names}; use data with the same classes, or initialise the "
            "last layer as in any other run by init.map='classes='."
        )
    multihost.check_same({"config.init.run": parent.record}, "name the same run in every process")
    return Inherited(parent, given_tokenizer.of_parent(parent.tokenizer, config))


def _check_has_parent(config: Config, workdir: Path) -> None:
    """Raises InputError if only one of the earlier start and this one has a parent."""
    if not workdir_lib.has_run(workdir):
        return
    old, new = workdir_lib.read_config(workdir).init.run, config.init.run
    if old is None and new is not None:
        raise InputError(
            f"config.init.run: the run in {workdir} started without another run, and this start "
            f"asks for {new!r}; leave it unset, or use a new --workdir."
        )
    if old is not None and new is None:
        raise InputError(
            f"config.init.run: the run in {workdir} started from {old!r}; name that run, wherever "
            "it is now, leave --config out, or use a new --workdir."
        )


def _check_recorded(parent: Parent, config: Config, workdir: Path) -> None:
    """Raises InputError if the parent has other parameters or another tokenizer than recorded."""
    file = Workdir(place(workdir)).init
    if not file.exists():
        return
    try:
        recorded = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InputError(f"{file}: cannot be read: {error}; remove the workdir.") from error
    for name in ("parameters", "tokenizer"):
        if recorded.get(name) != parent.record[name]:
            raise InputError(
                f"config.init.run: the {name} of {config.init.run} are not those with which the "
                f"run in {workdir} was started ({recorded.get('run')}, "
                f"{'step' if 'steps' in recorded else 'export'} "
                f"{', '.join(map(str, recorded.get('steps', [])))}), and it has no checkpoint yet; "
                "put the old run back, or use a new --workdir."
            )


def check(config: Config, parent: Parent) -> dict[str, warm_start.Match]:
    """Returns where each parameter of the model of `config` comes from.

    Raises:
      InputError: the tokenizer, the model or the classes of `config` are not those of the parent.
    """
    given_tokenizer.check(parent.tokenizer, config, source=str(config.init.run))
    if config.init.vocabulary == "extend":
        sizes = expected_vocabularies(config)
    else:
        taken = given_tokenizer.of_parent(parent.tokenizer, config)
        assert taken.source and taken.target, "a parent has a tokenizer"
        has_two = config.data.target_tokenizer is not None
        of_target = taken.target.vocab_size if has_two else None
        sizes = vocabulary_sizes(config, (taken.source.vocab_size, of_target))
    return warm_start.match(
        shapes_of(with_vocabulary(config, *sizes)), parent.shapes, config, parent.config
    )


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter of the model, by its name."""
    shapes = parameters.shapes(transformer.build_model(config.model))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return {name_of(path): leaf.shape for path, leaf in leaves}


def first_parameters(
    config: Config,
    parent: Parent,
    fresh: Any,
    tokenizer: AnyTokenizer,
    *,
    on_host: Callable[[Any], np.ndarray] = np.asarray,
) -> tuple[Any, str]:
    """Returns the first parameters on the host, and a table of where each comes from.

    The parameters of `parent` are gone after this.

    Args:
      config: with the size of the vocabulary.
      fresh: initial parameters as in any other run.
      tokenizer: of this run.
      on_host: returns an array of `fresh`, whole; called for those that are not loaded.
    """
    found = check(config, parent)
    spelled: list[np.ndarray] = []
    if config.init.vocabulary == "extend":
        assert isinstance(parent.tokenizer, Tokenizer) and isinstance(tokenizer, Tokenizer)
        spelled = spellings(parent.tokenizer, tokenizer)
    leaves = jax.tree_util.tree_leaves_with_path(fresh)
    named = {
        name: on_host(leaf)
        for name, leaf in ((name_of(path), leaf) for path, leaf in leaves)
        if found[name].kind != warm_start.LOADED
    }
    values = warm_start.merged(
        found,
        parent.params,
        named,
        spellings=spelled,
        new_embeddings=config.init.new_embeddings,
        new_bias=config.init.new_bias,
    )
    tree = jax.tree_util.tree_map_with_path(lambda path, _: values[name_of(path)], fresh)
    new = {name: value.shape for name, value in values.items()}
    text = warm_start.table(found, new, parent.shapes, config, parent.config)
    parent.params.clear()  # their memory is free for the training
    return tree, text


def _read(config: Config) -> Parent:
    init = config.init
    assert init.run is not None, "there is a parent"
    folder = place(init.run)
    if in_bucket(folder):
        check_bucket(folder)
    if not workdir_lib.has_run(folder):
        raise InputError(
            "expected the workdir of a run, or a folder of `export safetensors`, but it has no "
            "config.json; check the path."
        )
    parent = workdir_lib.read_config(folder)
    paths = Workdir(folder)
    tokenizer = tokenizer_lib.load(paths.tokenizer, config_lib.source_normalization(parent))
    parent = with_vocabulary(parent, *vocabulary_sizes(parent, two_vocabularies.sizes(tokenizer)))
    shapes = parameters.shapes(transformer.build_model(parent.model))
    if (folder / EXPORT).is_file():
        params, facts, label_names = *_read_export(folder, shapes, config), None
    else:
        params, facts, label_names = _read_run(paths, shapes, parent, tokenizer, config)
    named = {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    record = {
        "run": absolute(folder).name,
        **facts,
        "parameters": checksum(named),
        "tokenizer": tokenizer.fingerprint,
        "license": _license(paths),
    }
    return Parent(parent, tokenizer, named, record, label_names)


def _license(paths: Workdir) -> str | None:
    """Returns the licence of the weights that the run itself started from, if it is known."""
    for file in (paths.imported, paths.init):
        if file.exists():
            license: str | None = json.loads(file.read_text(encoding="utf-8")).get("license")
            return license
    return None


def _read_run(
    paths: Workdir, shapes: Any, parent: Config, tokenizer: AnyTokenizer, config: Config
) -> tuple[Any, dict[str, Any], list[str] | None]:
    """Returns the parameters of a run, their origin, and the names of its classes."""
    metric = parent.train.best_metric
    checkpoints = None
    if paths.checkpoints.is_dir():
        scores = metrics_log.validation_scores(
            paths.metrics, lambda values: metrics.score(values, metric)
        )
        due = origin.schedule(parent)
        checkpoints = Checkpoints(paths.checkpoints, scores=scores, due=due, read_only=True)
    if checkpoints is None or not checkpoints.steps():
        raise InputError("there is no checkpoint yet; train that run first.")
    # NumPy arrays: each process reads all of them, and no device holds them.
    like = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    params, record, found = origin.restore(
        checkpoints,
        like,
        parent,
        average=config.init.average,
        parameters=config.init.parameters,
    )
    checkpoints.close()
    if record["tokenizer"] != tokenizer.fingerprint:
        raise InputError(
            f"{paths.tokenizer}: this is not the tokenizer that step {found.step} was trained "
            "with; put the run's own back."
        )
    steps = {"steps": list(found.steps), "kind": found.kind, "average": found.average}
    facts = {"format": "run", **steps, "data": record.get("data")}
    return params, facts, record.get("label_names")


def _read_export(folder: Path, shapes: Any, config: Config) -> tuple[Any, dict[str, Any]]:
    """Returns the parameters of a folder of `export safetensors`, and their origin."""
    for name in ("average", "parameters"):
        if getattr(config.init, name) is not None:
            raise InputError(
                f"{folder} is an export, with one set of parameters; leave it unset.",
                where=f"config.init.{name}",
            )
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load
    except ImportError as error:
        raise InputError("needs the extra: pip install 'flaxformer_lite[exchange]'.") from error
    try:
        arrays = load((folder / EXPORT).read_bytes())
    except (SafetensorError, OSError) as error:
        raise InputError(f"{folder / EXPORT}: cannot be read: {error}.") from error
    expected = {
        name_of(path).replace("/", "."): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    if {name: array.shape for name, array in arrays.items()} != expected:
        raise InputError(
            f"{folder / EXPORT}: its arrays are not those of the model in its config.json; export "
            "the run again."
        )
    params = jax.tree_util.tree_map_with_path(
        lambda path, _: arrays[name_of(path).replace("/", ".")], shapes
    )
    return params, {"format": "safetensors"}


def checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of arrays and their names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name], np.float32).tobytes())
    return digest.hexdigest()
