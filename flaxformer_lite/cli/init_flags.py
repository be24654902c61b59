"""The flags of `train` for a start from another run: short names for the fields of `init`."""

import dataclasses

from absl import flags
from ml_collections import config_dict

from flaxformer_lite import config as config_lib
from flaxformer_lite.cli.shared_flags import define_in
from flaxformer_lite.field_rules import CHOICES
from flaxformer_lite.fields import Config, DataConfig, InitConfig
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import place

# Fields of `data` that are about training a tokenizer: those of --init are not inherited.
OF_TOKENIZER = (
    *("tokenizer_file", "target_tokenizer_file"),
    *("vocabulary_sample", "character_coverage"),
)


def define(values: flags.FlagValues) -> None:
    """Defines --init and the flags that need it."""
    flag = define_in(values)
    flag.string("init", None, "run, or folder of `export safetensors`, to start from")
    average = "--init: average of its checkpoints: last:N, best:N or none; default: its own"
    flag.string("init_average", None, average)
    parameters = "--init: parameters to use; default: ema, if it has a moving average"
    flag.enum("init_parameters", None, list(CHOICES["init.parameters"]), parameters)
    rules = "--init: rules NEW=OLD,... for parameters of other names: a regular expression, a start"
    flag.list("init_map", None, rules)
    missing = "--init: parameters that it lacks: refuse, or initialise them at random"
    flag.enum("init_missing", None, list(CHOICES["init.missing"]), missing)
    vocabulary = "--init: its tokenizer: the same, or extend it to data.vocab_size by new pieces"
    flag.enum("init_vocabulary", None, list(CHOICES["init.vocabulary"]), vocabulary)


def overrides(values: flags.FlagValues) -> list[str]:
    """Returns the flags as `--config.init.field=value`; `plan` has none of them."""
    fields = [field.name for field in dataclasses.fields(InitConfig)]
    names = {"init": "run", **{f"init_{field}": field for field in fields}}
    found = []
    for flag, field in names.items():
        value = values[flag].value if flag in values else None
        if value is not None:
            found.append(
                f"--config.init.{field}={tuple(value) if isinstance(value, list) else value}"
            )
    return found


def inherited_config(name: str) -> tuple[str, config_dict.ConfigDict]:
    """Returns the name of a run, and the config that a run from its weights has by default.

    It is the config of that run, without its own `init`, the fields about training a tokenizer,
    and the number of classes, which the new data defines.

    Raises:
      InputError: there is no such run.
    """
    path = place(name)
    if not workdir_lib.has_run(path):
        raise InputError(
            f"config.init.run: {name}: expected the workdir of a run, or a folder of `export "
            "safetensors`, but it has no config.json; check the path."
        )
    config = workdir_lib.read_config(path)
    defaults = DataConfig()
    data = {field: getattr(defaults, field) for field in OF_TOKENIZER}
    model = dataclasses.replace(
        config.model, vocab_size=None, target_vocab_size=None, num_classes=None
    )
    config = dataclasses.replace(
        config, model=model, data=dataclasses.replace(config.data, **data), init=Config().init
    )
    return path.name or "init", config_lib.to_config_dict(config)
