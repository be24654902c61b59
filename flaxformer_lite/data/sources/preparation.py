"""Prepares TFDS datasets once, for any number of processes at the same time, and opens them."""

import contextlib
import difflib
import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path

import tensorflow_datasets as tfds
from tensorflow_datasets.core import writer
from tensorflow_datasets.proto import tf_example_pb2

from flaxformer_lite.field_rules import OWN_TEXT
from flaxformer_lite.system.errors import InputError, did_you_mean, is_of_a_disk, is_of_a_path
from flaxformer_lite.system.storage import check_bucket, fetch, in_bucket, locked, on_disk, place

# Datasets that the package generates.
GENERATED = ("cldr_translate", "cldr_language", "modular_addition", "listops", "algorithms")
REPORT = "faults.txt"  # lists the malformed lines that were dropped; next to the data


class SameBytesWriter(writer.ExampleWriter):
    """Writes the features of a record sorted by name; protobuf's own order varies by process."""

    def write(self, path: str | PathLike[str], examples: Iterable[tuple[int, bytes]]) -> None:
        """Writes a file of records, given as (number, serialised `tf.train.Example`)."""
        records = ((key, tf_example_pb2.Example.FromString(record)) for key, record in examples)
        super().write(
            path, ((key, record.SerializeToString(deterministic=True)) for key, record in records)
        )


def data_root() -> Path:
    """Returns the folder of all datasets on this disk.

    This is `TFDS_DATA_DIR`, or the folder of its local copies if it is in a bucket: examples are
    read at random from memory-mapped files, which a bucket does not support.
    """
    return on_disk(place(tfds.core.constants.DATA_DIR), "data").expanduser()


def open_prepared(name: str) -> tfds.core.DatasetBuilder:
    """Returns the builder of a registered TFDS dataset; fetches it first if it is in a bucket.

    Raises:
      InputError: the bucket cannot be read, or there is no such dataset; it says what to name.
    """
    root = place(tfds.core.constants.DATA_DIR)
    if not in_bucket(root):
        return _builder(name)
    check_bucket(root)
    try:
        dataset, how = tfds.core.naming.parse_builder_name_kwargs(name)
    except ValueError as error:
        raise InputError(f"expected the name of a dataset{_nearest(name)}") from error
    folder = "/".join(
        [str(dataset), *(how[part] for part in ("config", "version") if how.get(part))]
    )
    if not (root / folder).is_dir():
        raise InputError(f"nothing is in {root / folder}")
    below = sorted(entry.name for entry in (root / folder).iterdir())
    configs = [
        name for name in below if not (name.startswith(".") or tfds.core.Version.is_valid(name))
    ]
    if "config" not in how and configs:  # one config may be as large as all others together
        raise InputError(
            f"{root} has {', '.join(configs)} of it; name one, as in {dataset}/{configs[0]}"
        )
    fetch(root / folder, data_root() / folder)
    return _builder(name, data_dir=data_root())


def _builder(name: str, **options: Path) -> tfds.core.DatasetBuilder:
    """Returns `tfds.builder`; raises InputError if there is no such dataset."""
    try:
        if tfds.core.naming.parse_builder_name_kwargs(name)[0].namespace:  # TFDS would ask a server
            raise ValueError("datasets of a community cannot be read")
        return tfds.builder(name, **options)
    except Exception as error:  # TFDS raises many types, and those of the network
        if isinstance(error, OSError) and (is_of_a_disk(error) or is_of_a_path(error)):
            raise
        # TFDS puts the name and the arguments before the reason, and lists names below it.
        reason = ([*str(error).strip().splitlines(), type(error).__name__])[0]
        reason = re.sub(r'^Failed to construct .*builder_kwargs ".*?": ', "", reason)
        reason = re.sub(r"\W+Here are .*:$| with version None", "", reason.strip()).rstrip(".")
        raise InputError(f"{reason}{_nearest(name)}") from error


def _nearest(name: str) -> str:
    """Returns the end of a message about a TFDS dataset that cannot be opened: what to name."""
    dataset, _, config = name.partition("/")
    try:
        # With a colon, TFDS would ask a server for the datasets of a community.
        configs = None if ":" in dataset else list(tfds.builder_cls(dataset).builder_configs)
    except Exception:  # there is no such dataset
        configs = None
    if configs is None:
        known = [*GENERATED, *OWN_TEXT, *tfds.list_builders(with_community_datasets=False)]
        if near := difflib.get_close_matches(dataset, known, n=1):
            return f"; did you mean {near[0]!r}?"
        return (
            f"; name a dataset of TFDS that is prepared in {tfds.core.constants.DATA_DIR} "
            f"(TFDS_DATA_DIR), or one of {', '.join((*GENERATED, *OWN_TEXT))}."
        )
    config, _, version = config.partition(":")
    if version:
        return "; leave out the version."
    return did_you_mean(config, configs) if configs else "; name another dataset."


def prepare(builder: tfds.core.DatasetBuilder) -> None:
    """Writes the dataset under its TFDS folder, once even if many processes call this together.

    Prints to standard error, at each call, the number of malformed examples that were dropped from
    custom text.

    Raises:
      InputError: the folder cannot be written, or contains something else.
    """
    if not _is_prepared(builder):
        try:
            with dataset_lock(builder):
                if not _is_prepared(builder):  # no other process did it while this one waited
                    _remove_leftovers(builder)
                    generate(builder)
        except OSError as error:
            raise InputError(
                f"Cannot write the dataset {builder.info.full_name} to {root_of(builder)} "
                f"({error.strerror or error}); "
                "set TFDS_DATA_DIR or `data_dir` to a writable folder."
            ) from error
    if not _is_prepared(builder):  # TFDS leaves an existing folder as it is
        raise InputError(
            f"Expected a dataset in {builder.data_dir}, got no dataset_info.json there; remove "
            "the folder."
        )
    # another process may have written it since `builder` was made
    builder.info.read_from_directory(builder.data_path)
    for line in _dropped(builder):
        print(line, file=sys.stderr, flush=True)


def _dropped(builder: tfds.core.DatasetBuilder) -> list[str]:
    """Returns a line for each split with dropped examples, from the end of the report."""
    report = Path(builder.data_dir) / REPORT
    if not report.exists():
        return []
    with report.open("rb") as file:
        file.seek(max(0, report.stat().st_size - 4096))  # the counts are the last lines
        counts = file.read().decode(errors="replace").splitlines()[-len(builder.info.splits) :]
    kind = builder.info.config_name.rpartition("-")[0]
    return [f"{kind}, {line}; left out, see {report}" for line in counts if ": 0 of " not in line]


def _is_prepared(builder: tfds.core.DatasetBuilder) -> bool:
    return (builder.data_path / "dataset_info.json").exists()


def root_of(builder: tfds.core.DatasetBuilder) -> Path:
    """Returns the folder of all datasets, which contains `builder`'s dataset/config/version."""
    return Path(builder.data_dir).parents[builder.info.full_name.count("/")]


@contextlib.contextmanager
def dataset_lock(builder: tfds.core.DatasetBuilder) -> Iterator[None]:
    """Holds the lock file of the dataset."""
    root_of(builder).mkdir(parents=True, exist_ok=True)
    with locked(root_of(builder) / f".{builder.info.full_name.replace('/', '.')}.lock"):
        yield


def _remove_leftovers(builder: tfds.core.DatasetBuilder) -> None:
    """Removes the folder of a killed preparation; the lock excludes that one is still running."""
    target = Path(builder.data_dir)
    for folder in target.parent.glob(f"incomplete.*_{target.name}"):
        shutil.rmtree(folder)


def generate(builder: tfds.core.DatasetBuilder) -> None:
    """Generates the dataset: TFDS writes to a temporary folder and renames it; muted."""
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()
    finally:
        tfds.enable_progress_bar()


def check_prepared(name: str, builder: tfds.core.DatasetBuilder) -> None:
    """Raises InputError if the dataset `name` is not prepared, or not as ArrayRecord."""
    file_format = builder.info.file_format.value
    if builder.info.splits and file_format != "array_record":
        raise InputError(
            f"{builder.data_dir} is prepared as {file_format}, and reading needs array_record; "
            "convert it once, where TensorFlow is installed, with: "
            "python -m tensorflow_datasets.scripts.convert_format "
            + shlex.quote(f"--dataset_version_dir={builder.data_dir}")
            + f" --out_file_format=array_record --out_dir=NEW/{builder.info.full_name}, and set "
            "TFDS_DATA_DIR=NEW",
            where="config.data.dataset",
        )
    if not builder.info.splits:
        raise InputError(
            f"{name} is not prepared: {builder.data_dir} is empty; set TFDS_DATA_DIR "
            "to its folder, or prepare it once, on a machine with TensorFlow, with: "
            f"tfds build {shlex.quote(name)} --file_format=array_record",
            where="config.data.dataset",
        )


def number_in_name(config: str, *, meaning: str, bounds: tuple[int, int], example: str) -> int:
    """Returns the whole number that is the config of a generated dataset.

    Args:
      config: the part of the full name after the '/'.
      meaning: of the number, for the error.
      bounds: the lowest and the highest number.
      example: a full name, such as 'listops/256'.

    Raises:
      InputError: it is not a whole number within the bounds, without leading zeros.
    """
    least, most = bounds
    if not config.isdecimal() or str(int(config)) != config or not least <= int(config) <= most:
        raise InputError(
            f"expected the config of {example.partition('/')[0]} to be {meaning}, {least} to "
            f"{most:,}, such as {example!r}; got {config!r}."
        )
    return int(config)
