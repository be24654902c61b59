"""The builders of the datasets that the package generates, by the name of the dataset."""

import tensorflow_datasets as tfds

from flaxformer_lite.data.sources import algorithms, builders, listops, modular_addition
from flaxformer_lite.system.errors import InputError


def builder(name: str, config: str) -> tfds.core.DatasetBuilder:
    """Returns the builder of one of `preparation.GENERATED`.

    Args:
      config: the part of the full name after the '/'; empty: the default one.

    Raises:
      InputError: the dataset has no such config.
    """
    if name == "cldr_language":
        if config:
            raise InputError("it has no configs; leave out the part after its name")
        return builders.cldr_language()
    with_configs = {
        "cldr_translate": builders.cldr_translate,
        "modular_addition": modular_addition.builder,
        "listops": listops.builder,
        "algorithms": algorithms.builder,
    }
    return with_configs[name](config) if config else with_configs[name]()
