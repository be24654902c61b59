"""Refuses fields that contradict each other or have no effect: of training and its devices."""

import dataclasses
import math
import re
from collections.abc import Sequence, Set

from flaxformer_lite.checks.alignment_checks import check_alignments
from flaxformer_lite.checks.metric_checks import check_metric_command
from flaxformer_lite.checks.vocabularies import copied_from
from flaxformer_lite.field_rules import CHOICES, DROPOUTS, ERROR_RATES, EXTERNAL
from flaxformer_lite.fields import Config, InitConfig, ModelConfig, TrainConfig
from flaxformer_lite.system.errors import InputError

GROUP_FORM = "'RULE: rate=0.1 decay=False', with one of rate and decay, or both"


def check_training(config: Config, given: Set[str]) -> None:
    """Raises InputError if two fields of training, optimizer, start or devices contradict.

    Args:
      given: 'section.field' of each field that differs from its default, or was given.
    """
    _check_regularization(config)
    check_alignments(config, given)
    if config.train.average is not None:
        _check_average(config.train)
    _check_optim(config, given)
    _check_parallel(config)
    check_metric_command(config, given)
    _check_best_metric(config)
    _check_init(config, given)


def _check_regularization(config: Config) -> None:
    """Raises InputError if a regulariser has no effect with the other fields.

    R-Drop needs passes that differ, and tied layers at least 2 layers in a stack.
    """
    model = config.model
    is_random = any(_rate(model, name) for name in DROPOUTS)
    if config.train.r_drop and not is_random:
        raise InputError(
            "config.train.r_drop: compares two passes with dropout, but model.dropout is 0; set "
            "that, or leave this unset."
        )
    if model.tie_layers and max(_stacks(model).values()) < 2:
        names = " and ".join(_stacks(model))
        raise InputError(
            f"config.model.tie_layers: shares the parameters of 2 or more layers, but {names} "
            f"{'is' if len(_stacks(model)) == 1 else 'are'} 1; raise the number of layers, or "
            "leave this unset."
        )


def _rate(model: ModelConfig, name: str) -> float:
    """Returns the rate of a kind of dropout."""
    rate: float | None = getattr(model, name)
    return model.dropout if rate is None else rate


def _stacks(model: ModelConfig) -> dict[str, int]:
    """Returns the number of layers of each stack that the model has, by its field."""
    stacks = {
        "model.num_encoder_layers": model.num_encoder_layers,
        "model.num_decoder_layers": model.num_decoder_layers,
    }
    unused = {
        "encoder_classifier": "model.num_decoder_layers",
        "decoder_lm": "model.num_encoder_layers",
    }
    return {name: n for name, n in stacks.items() if name != unused.get(model.architecture)}


def parse_average(name: str, text: object) -> tuple[str, int]:
    """Returns ('last', 5) for 'last:5', and ('best', 5) for 'best:5'.

    Raises:
      InputError: `text` has another form; the message starts with `name`.
    """
    which, _, count = text.partition(":") if isinstance(text, str) else ("", "", "")
    is_number = count.isascii() and count.isdecimal() and len(count) < 10
    if which not in ("last", "best") or not (is_number and int(count)):
        raise InputError(f"{name}: expected last:N or best:N, such as last:5, got {text!r}.")
    return which, int(count)


def _check_average(train: TrainConfig) -> None:
    """Raises InputError if the run may end with fewer checkpoints than `train.average` needs."""
    which, count = parse_average("config.train.average", train.average)
    field = {"last": "keep_newest", "best": "keep_best"}[which]
    if getattr(train, field) < count:
        raise InputError(
            f"config.train.average: {train.average!r} needs {count} checkpoints, and "
            f"train.{field} = {getattr(train, field)} keeps fewer; set train.{field} to {count}."
        )
    steps, made_every = train.num_steps, [train.eval_every]
    if train.patience is not None:
        steps = min(steps, (train.patience + 1) * train.eval_every)  # the earliest stop
    if which == "last":
        made_every.append(train.checkpoint_every)
    made = sum(steps // every for every in made_every) + all(steps % every for every in made_every)
    if which == "last":
        made -= steps // math.lcm(*made_every)  # counted under both
    if made < count:
        raise InputError(
            f"config.train.average: {train.average!r} needs {count} checkpoints, and {steps} "
            f"steps make {made}; average fewer, train longer, or lower "
            f"train.{'eval_every' if which == 'best' else 'checkpoint_every'}."
        )


def _check_parallel(config: Config) -> None:
    """Raises InputError if the axes of the mesh contradict each other or the mode."""
    parallel = config.parallel
    sizes = {"data": parallel.data, "fsdp": parallel.fsdp, "tensor": parallel.tensor}
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise InputError(
                f"config.parallel.{axis}: expected -1 (the rest of the devices) or at least 1, "
                f"got {size}."
            )
        if axis != "data" and size != 1 and parallel.mode == "pmap":
            raise InputError(
                f"config.parallel.{axis}: with parallel.mode='pmap' every device holds the whole "
                "model; leave it at 1, or use parallel.mode='mesh'."
            )
    if list(sizes.values()).count(-1) > 1:
        raise InputError(
            "config.parallel: -1 is all devices that the other two leave, so only one of data, "
            f"fsdp and tensor may be -1, got {parallel.data}, {parallel.fsdp} and "
            f"{parallel.tensor}; set the others."
        )


def _check_best_metric(config: Config) -> None:
    """Raises InputError if evaluations do not compute the metric of the best checkpoint."""
    metric, pretokenized = config.train.best_metric, config.data.pretokenized
    of_translations = metric not in ("loss", "accuracy")
    if of_translations and config.model.architecture != "encoder_decoder":
        raise InputError(
            f"config.train.best_metric: {metric!r} needs translations, and "
            f"model.architecture={config.model.architecture!r} makes none; choose 'loss' or "
            "'accuracy'."
        )
    if of_translations and config.train.decode_examples == 0:
        raise InputError(
            f"config.train.best_metric: {metric!r} needs translations, but "
            "train.decode_examples is 0; raise it, or choose 'loss' or 'accuracy'."
        )
    external = None if config.train.metric_command is None else config.train.metric_name
    if metric in EXTERNAL and metric != external:
        raise InputError(
            f"config.train.best_metric: {metric!r} is the number of a program, and "
            + (
                "train.metric_command is unset; set that, or choose another metric."
                if external is None
                else f"train.metric_name={external!r}; set both to the same name."
            )
        )
    if metric in ERROR_RATES and not config.data.has_symbols:
        name = "tokenizer" if config.data.target_tokenizer is None else "target_tokenizer"
        raise InputError(
            f"config.train.best_metric: {metric!r} counts symbols with spaces between them, and "
            f"data.{name}={getattr(config.data, name)!r} has other tokens; set data.{name} to "
            "'spaces' or 'word', or choose another metric."
        )
    if config.data.bleu_tokenizer is not None and pretokenized:
        raise InputError(
            "config.data.bleu_tokenizer: the texts of data.pretokenized=True are not tokenized "
            "again; leave it unset."
        )
    computed = {False: ("bleu", "chrf"), True: ("bleu_tokenized",)}  # by data.pretokenized
    if metric in computed[not pretokenized]:
        raise InputError(
            f"config.train.best_metric: {metric!r} is not computed if data.pretokenized is "
            f"{pretokenized}; choose {' or '.join(map(repr, computed[pretokenized]))}, or "
            "another metric."
        )


@dataclasses.dataclass(frozen=True)
class Group:
    """A rule of `optim.groups`, and the settings of the parameters that it matches."""

    rule: str  # a regular expression for the end of a parameter's name
    rate: float = 1.0  # factor of the learning rate
    decay: bool | None = None  # whether there is weight decay; None: by default


def parse_group(text: str) -> Group:
    """Returns the group of such as 'encoder/.*: rate=0.1 decay=False'.

    Raises:
      InputError: the text has another form.
    """
    rule, _, given = text.rpartition(":")
    options = [option.partition("=")[::2] for option in given.split()]
    names = [name for name, _ in options]
    if not rule.strip() or not options or set(names) - {"rate", "decay"}:
        raise InputError(f"config.optim.groups: expected {GROUP_FORM}, got {text!r}.")
    if len(set(names)) < len(names):
        raise InputError(f"config.optim.groups: {text!r} sets an option 2 times; remove one.")
    settings: dict[str, float | bool] = {}
    for name, value in options:
        try:
            settings[name] = (
                {"True": True, "False": False}[value] if name == "decay" else float(value)
            )
        except (KeyError, ValueError):
            expected = "True or False" if name == "decay" else "a number"
            raise InputError(
                f"config.optim.groups: {text!r}: expected {expected} for {name}, got {value!r}."
            ) from None
    if not 0 < settings.get("rate", 1.0) < math.inf:
        raise InputError(
            f"config.optim.groups: {text!r}: expected a positive finite rate; to keep parameters "
            "as they are, use optim.freeze."
        )
    return Group(rule.strip(), **settings)  # type: ignore[arg-type]


def _check_optim(config: Config, given: Set[str]) -> None:
    """Raises InputError if two fields of the optimizer contradict each other.

    Args:
      given: 'section.field' of each field that differs from its default, or was given.
    """
    optim = config.optim
    if "optim.weight_decay" in given and optim.optimizer == "adam":
        raise InputError(
            "config.optim.weight_decay: optim.optimizer='adam' has no weight decay; use "
            "optim.optimizer='adamw', or leave this unset."
        )
    if optim.optimizer == "schedule_free" and optim.schedule != "constant":
        others = ", ".join(name for name in CHOICES["optim.optimizer"] if name != "schedule_free")
        raise InputError(
            f"config.optim.schedule: {optim.schedule!r} decays, and optim.optimizer="
            "'schedule_free' averages iterates of a constant rate in place of a decay; set "
            f"optim.schedule='constant', or another optimizer: {others}."
        )
    _check_last_phase(config)
    _check_rules(config)


def _check_last_phase(config: Config) -> None:
    """Raises InputError if warmup and decay of 'wsd' are longer than the training."""
    optim, num_steps = config.optim, config.train.num_steps
    if optim.decay_steps is not None and optim.warmup_steps + optim.decay_steps > num_steps:
        raise InputError(
            f"config.optim.decay_steps: {optim.warmup_steps:,} steps of optim.warmup_steps and "
            f"{optim.decay_steps:,} of decay are more than train.num_steps = {num_steps:,}; "
            "lower one of the two, or train longer."
        )


def _check_rules(config: Config) -> None:
    """Raises InputError if a rule is no regular expression, or a group's decay has no effect."""
    optim = config.optim
    groups = [(text, parse_group(text)) for text in optim.groups]
    rules = [("freeze", rule) for rule in optim.freeze]
    for field, rule in [*rules, *(("groups", group.rule) for _, group in groups)]:
        try:
            re.compile(rule)
        except re.error as error:
            raise InputError(
                f"config.optim.{field}: {rule!r} is no regular expression: {error}; correct it."
            ) from None
    for text, group in groups:
        if group.decay is not None and not optim.weight_decay:
            raise InputError(
                f"config.optim.groups: the decay of {text!r} has no effect with "
                "optim.weight_decay=0.0; raise that, or remove decay from the rule."
            )


def _check_init(config: Config, given: Set[str]) -> None:
    """Raises InputError if two fields of `init`, or one of them and the tokenizer, contradict.

    Args:
      given: 'section.field' of each field that differs from its default, or was given.
    """
    init = config.init
    for field in dataclasses.fields(InitConfig):
        if field.name != "run" and f"init.{field.name}" in given and init.run is None:
            raise InputError(
                f"config.init.{field.name}: requires init.run, the run to start from; set that, "
                "or leave this unset."
            )
    for name, path in (("init.run", init.run), ("data.tokenizer_file", config.data.tokenizer_file)):
        if path is not None and not path.strip():
            raise InputError(f"config.{name}: expected a path, got {path!r}; leave it unset.")
    _check_tokenizer(config, given)
    if config.data.tokenizer == "marian" and init.vocabulary == "extend":
        raise InputError(
            "config.init.vocabulary: an imported tokenizer has two models and cannot be extended; "
            "leave it unset."
        )
    if init.new_bias and not config.model.output_bias:
        raise InputError(
            "config.init.new_bias: requires model.output_bias=True, whose biases it sets; set "
            "that, or leave this unset."
        )
    if init.average is not None and init.average != "none":
        parse_average("config.init.average", init.average)
    rules(init.map)


def _check_tokenizer(config: Config, given: Set[str]) -> None:
    """Raises InputError if the tokenizer has two sources, or is copied and yet to be trained."""
    init, data = config.init, config.data
    if init.run is not None and data.tokenizer_file is not None:
        raise InputError(
            "config.data.tokenizer_file: the tokenizer is that of init.run, to whose pieces its "
            "embeddings belong; leave this unset."
        )
    source = "data.tokenizer_file" if init.run is None else "init.run"
    for name in ("vocabulary_sample", "character_coverage"):
        if copied_from(config) and f"data.{name}" in given:
            raise InputError(
                f"config.data.{name}: is for training a tokenizer, and that of {source} is copied; "
                "leave this unset."
            )


def rules(given: Sequence[str]) -> list[tuple[re.Pattern[str], str]]:
    """Returns the rules of `init.map`: a pattern of new names, and the template of the old start.

    Raises:
      InputError: a rule has no '=', or its pattern or template is not valid.
    """
    parsed = []
    for rule in given:
        new, equals, old = rule.rpartition("=")
        try:
            pattern = re.compile(rf"(?:{new})(?=/|$)")
            if not (equals and new.strip()):
                raise re.error("expected NEW=OLD")
            re.compile(rf"(?:{new})|").sub(old, "")  # a wrong reference to a group is found here
        except (re.error, IndexError) as error:
            raise InputError(
                f"config.init.map: {rule!r} is no rule: {error}; write NEW=OLD, such as "
                "'encoder/layers_(2|3)=encoder/layers_1'."
            ) from error
        parsed.append((pattern, old))
    return parsed
