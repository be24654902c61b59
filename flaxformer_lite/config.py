"""Every setting and its default: frozen dataclasses, and the one crossing from a user's ConfigDict to them.

The defaults are the base model of "Attention Is All You Need" (sections 3, 5 and 6.1). A config file only
states what differs:

    from flaxformer_lite.config import default_config

    def get_config():
        config = default_config()
        config.model.d_model = 1024
        return config
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import config_dict


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of the Transformer. "Section" and "Table" without a name are those of "Attention Is All You Need"."""

    architecture: str = (
        "encoder_decoder"  # section 3.1; 'encoder_classifier' (Devlin 2019), 'decoder_lm' (Radford 2018)
    )
    vocab_size: int | None = None  # ids 0..vocab_size-1; None: as many as the tokenizer has; section 5.1
    d_model: int = 512  # width of embeddings and of every layer's input and output; section 3.1
    num_heads: int = 8  # attention heads; section 3.2.2
    num_kv_heads: int | None = None  # heads of keys and values that queries share (Ainslie 2023); None: num_heads
    d_head: int | None = None  # size of one head's queries, keys and values; None: d_model / num_heads; section 3.2.2
    d_ff: int = 2048  # inner width of the feed-forward network; section 3.3
    num_encoder_layers: int = 6  # section 3.1
    num_decoder_layers: int = 6  # section 3.1
    max_length: int = 256  # longest source or target, in tokens with end of sentence; section 3.5
    position: str = "sinusoidal"  # section 3.5; the schemes, and the source of each, are in model/positions.py
    rope_base: float = 10000.0  # 'rotary': the longest wavelength is 2 pi times this (Su 2021, section 3.2.2)
    relative_clip: int = 16  # 'relative': distances beyond this share one vector (Shaw 2018, section 3.2)
    relative_values: bool = False  # 'relative': vectors are added to values too (Shaw 2018, equation 3)
    attention: str = "dot_product"  # section 3.2.1; 'additive' (Bahdanau 2015, appendix A.1.2), which it discusses
    attention_window: int | None = None  # farthest token that self-attention sees; None: all; section 4
    backend: str = "auto"  # what computes attention, to the same result; section 3.2.1 and model/backends.py
    norm: str = "layer_norm"  # section 3.1 (Ba 2016); 'rms_norm' (Zhang 2019)
    norm_placement: str = "post"  # section 3.1: LayerNorm(x + sublayer(x)); 'pre' (Xiong 2020): x + sublayer(norm(x))
    norm_epsilon: float = 1e-6  # added to the variance before the square root (Ba 2016)
    activation: str = "relu"  # section 3.3; 'gelu', 'silu' and gated 'reglu', 'geglu', 'swiglu' (Shazeer 2020)
    use_bias: bool = True  # in attention, feed-forward and LayerNorm; section 3.3. False: Chowdhery 2022, section 2
    output_bias: bool = False  # one number a token, added to the logits; section 3.4 has none
    tie_embeddings: bool = True  # source, target and output share one matrix, section 3.4; False: a matrix each
    pooling: str = "mean"  # 'encoder_classifier': 'mean' of a text's vectors, or its 'first' (Devlin 2019, section 3)
    num_classes: int | None = None  # 'encoder_classifier': None: as many as the dataset has (Devlin 2019, section 3)
    dropout: float = 0.1  # on embeddings and on each sublayer's output; section 5.4
    attention_dropout: float = 0.0  # on attention weights (Devlin 2019, appendix A.2); section 5.4 names none
    dtype: str = "float32"  # of activations, or 'bfloat16' (Kalamkar 2019); parameters, softmax, loss stay float32


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to learn from, and how it is cut into batches."""

    dataset: str = "cldr_translate/en-de"  # a TFDS dataset that suits model.architecture: name/config
    source_language: str | None = None  # translation: the side to translate from; None: the first in the dataset's name
    text_features: str | None = None  # classifier, language model: 'a,b' joined to one text; None: all texts it has
    train_split: str = "train"  # TFDS split, slices allowed: 'train[:10%]'
    validation_split: str = "validation"  # measured at each evaluation; picks the best checkpoint
    test_split: str = "test"  # measured once, at the end
    tokenizer: str = "unigram"  # SentencePiece model: 'unigram' or 'bpe'; section 5.1 uses byte-pair encoding
    vocab_size: int = 37000  # pieces in the shared vocabulary, special tokens and bytes included; section 5.1
    tokens_per_batch: int = 25000  # target positions of a batch, padding included; section 5.1
    buckets: tuple[int, ...] = (32, 64, 128, 256)  # lengths batches are padded to; one compilation each
    packing: bool = False  # 'decoder_lm': texts one after another in rows of the longest bucket, each on its own
    rows_multiple: int = 8  # a batch's rows are a multiple of this, so that devices can share them
    seed: int = 0  # of the order of examples


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Adam with warmup; section 5.3."""

    schedule: str = "paper"  # 'paper': equation 3; 'inverse_sqrt': the same, named by its peak; 'linear': up, then to 0
    learning_rate: float = 1.0  # 'paper': factor of equation 3; else the highest rate reached
    warmup_steps: int = 4000  # steps of linear increase
    b1: float = 0.9  # decay of the mean of gradients
    b2: float = 0.98  # decay of the mean of squared gradients
    eps: float = 1e-9  # added to the denominator of the update
    clip_norm: float | None = None  # largest global gradient norm; None: no clipping
    accumulate_steps: int = 1  # microbatches a batch is split into; the result is that of the whole batch


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long to train, and what to keep."""

    num_steps: int = 100_000  # updates of the parameters
    label_smoothing: float = 0.1  # probability taken from the true token and spread evenly; section 5.4
    seed: int = 0  # of initialisation and dropout
    log_every: int = 100  # steps between lines of metrics.jsonl
    eval_every: int = 5000  # steps between evaluations on the validation split
    checkpoint_every: int = 1000  # steps between checkpoints; there is one at each evaluation too
    keep_newest: int = 2  # newest checkpoints kept
    keep_best: int = 1  # best checkpoints kept
    best_metric: str = "loss"  # on validation: 'loss', 'accuracy', 'exact_match', 'bleu' or 'chrf'
    patience: int | None = None  # evaluations without a better best_metric before stopping; None: never
    decode_examples: int = 200  # validation examples translated at each evaluation; 0: no samples


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How texts are written."""

    method: str = "greedy"  # 'greedy': the likeliest token; 'sample': drawn from what temperature, top_k, top_p leave
    temperature: float = 1.0  # 'sample': logits are divided by this; below 1 likely tokens become likelier
    top_k: int | None = None  # 'sample': only the k likeliest tokens (Fan 2018, section 5.4); None: all
    top_p: float | None = None  # 'sample': only the likeliest that make up this share (Holtzman 2020); None: all
    seed: int = 0  # 'sample': of the draws
    max_extra_length: int = 50  # most tokens beyond those of the source, or of the prompt; section 6.1


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """How devices share the work."""

    mode: str = "mesh"  # 'mesh': jit over a device mesh; 'pmap': one replica a device. Equal results
    data: int = -1  # devices that split the batch; -1: all


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)


CHOICES = {
    "model.architecture": ("encoder_decoder", "encoder_classifier", "decoder_lm"),
    "model.position": ("sinusoidal", "learned", "rotary", "relative", "t5_bias", "alibi", "none"),
    "model.attention": ("dot_product", "additive"),
    "model.backend": ("auto", "reference", "blockwise", "xla", "cudnn", "flash"),
    "model.norm": ("layer_norm", "rms_norm"),
    "model.activation": ("relu", "gelu", "gelu_tanh", "silu", "reglu", "geglu", "swiglu"),
    "model.pooling": ("mean", "first"),
    "model.norm_placement": ("post", "pre"),
    "model.dtype": ("float32", "bfloat16"),
    "data.tokenizer": ("unigram", "bpe"),
    "optim.schedule": ("paper", "inverse_sqrt", "linear"),
    "train.best_metric": ("loss", "accuracy", "exact_match", "bleu", "chrf"),
    "decode.method": ("greedy", "sample"),
    "parallel.mode": ("mesh", "pmap"),
}
PRODUCT_POSITIONS = ("rotary", "relative")  # they act through query . key, which additive attention has not
# Inclusive lowest values; a field that is not here may be any number its type allows.
AT_LEAST_ONE = """
    model.d_model model.num_heads model.num_kv_heads model.d_head model.d_ff model.max_length model.num_encoder_layers
    model.num_decoder_layers model.relative_clip model.attention_window data.tokens_per_batch data.rows_multiple
    optim.warmup_steps optim.accumulate_steps train.num_steps train.log_every train.eval_every train.checkpoint_every
    train.keep_newest train.patience decode.top_k
""".split()
AT_LEAST_ZERO = "train.keep_best train.decode_examples decode.max_extra_length data.seed train.seed decode.seed".split()
LOWEST = {**dict.fromkeys(AT_LEAST_ONE, 1), **dict.fromkeys(AT_LEAST_ZERO, 0), "model.num_classes": 2}
LOWEST |= {"model.vocab_size": 8, "data.vocab_size": 8}
HIGHEST = dict.fromkeys(("data.seed", "train.seed", "decode.seed"), 2**32 - 1) | {"decode.max_extra_length": 2**20}
POSITIVE = ("model.norm_epsilon", "model.rope_base", "optim.learning_rate", "optim.eps", "optim.clip_norm")
POSITIVE += ("decode.temperature", "decode.top_p")
BELOW_ONE = ("model.dropout", "model.attention_dropout", "train.label_smoothing", "optim.b1", "optim.b2")

# Fields that are read only where another field has this value: elsewhere they would be ignored.
READ_IF = {
    **dict.fromkeys(("model.relative_clip", "model.relative_values"), ("model.position", "relative")),
    "model.rope_base": ("model.position", "rotary"),
    "model.pooling": ("model.architecture", "encoder_classifier"),
    **dict.fromkeys(
        [f"decode.{field}" for field in ("temperature", "top_k", "top_p", "seed")], ("decode.method", "sample")
    ),
}

# What a resumed run may change. Steps that were computed stay as they are; those to come are the same too, but for
# rounding under another model.backend, and for the 'linear' schedule, which ends at a new train.num_steps.
RESUMED = "num_steps log_every eval_every checkpoint_every keep_newest keep_best patience decode_examples".split()
MAY_DIFFER_ON_RESUME = ("parallel.", "decode.", "model.backend", *(f"train.{name}" for name in RESUMED))


def default_config() -> config_dict.ConfigDict:
    """All defaults as a ConfigDict; fields that may be None are typed placeholders, so flags can set them."""
    return to_config_dict(Config())


def to_config_dict(config: Config) -> config_dict.ConfigDict:
    """A `Config` as the ConfigDict that `resolve` turns into the same `Config`."""
    result = config_dict.ConfigDict()
    for section in dataclasses.fields(config):
        result[section.name] = config_dict.ConfigDict()
        values, hints = getattr(config, section.name), typing.get_type_hints(section.type)
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if types.NoneType in typing.get_args(hints[field.name]):
                result[section.name][field.name] = config_dict.placeholder(_plain_type(hints[field.name]))
                if value is not None:
                    result[section.name][field.name] = value
            else:
                result[section.name][field.name] = value
    return result


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """A `Config` as plain nested dicts, ready for JSON."""
    return dataclasses.asdict(config)


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Fields that differ: (name, value in `old`, value in `new`), names as 'section.field'."""
    return [
        (f"{section}.{name}", value, to_dict(new)[section][name])
        for section, values in to_dict(old).items()
        for name, value in values.items()
        if value != to_dict(new)[section][name]
    ]


def resolve(user_config: Mapping[str, Any]) -> Config:
    """The strict crossing from a ConfigDict (or nested dicts) to a `Config`.

    Raises:
      ValueError: an unknown section or field (the nearest valid name is given), a value of the wrong type or
        out of range, or two fields that contradict each other. The message starts with the field's name.
    """
    sections = typing.get_type_hints(Config)
    if not isinstance(user_config, (Mapping, config_dict.ConfigDict)):
        raise ValueError(f"config: expected the sections {', '.join(sections)}, got {user_config!r}.")
    _check_names("", user_config, sections)
    resolved = {}
    for section, section_class in sections.items():
        values, hints = user_config.get(section, {}), typing.get_type_hints(section_class)
        if not isinstance(values, (Mapping, config_dict.ConfigDict)):
            raise ValueError(f"config.{section}: expected a section with fields, got {values!r}.")
        _check_names(f"{section}.", values, hints)
        checked = {name: _check_value(f"{section}.{name}", values[name], hints[name]) for name in values}
        resolved[section] = section_class(**checked)
    config = Config(**resolved)
    _check_contradictions(config)
    return config


def with_vocabulary(config: Config, vocab_size: int) -> Config:
    """`config` with `model.vocab_size` set to what the tokenizer has or will have; ValueError if it was another."""
    return _with_model_size(config, "vocab_size", vocab_size, whose="the tokenizer's size")


def with_classes(config: Config, label_names: list[str] | None) -> Config:
    """`config` with `model.num_classes` set to how many labels the dataset has; ValueError if it was another."""
    count = None if label_names is None else len(label_names)
    return _with_model_size(config, "num_classes", count, whose="what the dataset has")


def _with_model_size(config: Config, field: str, size: int | None, *, whose: str) -> Config:
    given = getattr(config.model, field)
    if given not in (None, size):
        raise ValueError(f"config.model.{field}: expected {size}, {whose}, or unset; got {given}.")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **{field: size}))


def _check_names(prefix: str, given: Iterable[str], valid: Iterable[str]) -> None:
    valid = list(valid)
    for name in given:
        if name not in valid:
            raise ValueError(f"config.{prefix}{name}: there is no such field{did_you_mean(name, valid)}")


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """How a message about a wrong `name` ends: "; did you mean 'x'?", or all that is valid if nothing is near."""
    valid = sorted(valid)
    near = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; valid are {', '.join(valid)}."


def _plain_type(hint: Any) -> type:
    """int for `int | None`, tuple for `tuple[int, ...]`."""
    for option in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        if option is not types.NoneType:
            return typing.get_origin(option) or option
    raise AssertionError(hint)


def _check_value(name: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type, or ValueError; an int is accepted for a float, nothing else is converted."""
    plain = _plain_type(hint)
    if value is None and types.NoneType in typing.get_args(hint):
        return None
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if plain is tuple and isinstance(value, list):
        value = tuple(value)
    wrong_item = plain is tuple and isinstance(value, tuple) and not all(type(item) is int for item in value)
    if type(value) is not plain or wrong_item:
        wanted = "a tuple of int" if plain is tuple else plain.__name__
        raise ValueError(f"config.{name}: expected {wanted}, got {value!r} ({type(value).__name__}).")
    if name in CHOICES and value not in CHOICES[name]:
        raise ValueError(f"config.{name}: {value!r} is not a choice{did_you_mean(value, CHOICES[name])}")
    if name in LOWEST and value < LOWEST[name]:
        raise ValueError(f"config.{name}: expected {LOWEST[name]} or more, got {value}.")
    if name in HIGHEST and value > HIGHEST[name]:
        raise ValueError(f"config.{name}: expected {HIGHEST[name]} or less, got {value}.")
    if name in POSITIVE and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"config.{name}: expected a positive finite number, got {value}.")
    if name in BELOW_ONE and not 0 <= value < 1:
        raise ValueError(f"config.{name}: expected at least 0 and less than 1, got {value}.")
    return value


def check_model(model: ModelConfig) -> None:
    """Raises ValueError where two fields of the model contradict each other."""
    if model.d_head is None and model.d_model % model.num_heads:
        raise ValueError(
            f"config.model.num_heads: {model.num_heads} heads do not divide d_model = {model.d_model}; "
            "change one of the two, or set model.d_head."
        )
    d_head = model.d_head or model.d_model // model.num_heads
    for scheme, field, width in (("sinusoidal", "d_model", model.d_model), ("rotary", "d_head", d_head)):
        if model.position == scheme and width % 2:
            raise ValueError(
                f"config.model.{field}: {scheme} positions pair a sine with a cosine and need an even width, got "
                f"{width}; make it even, or use another model.position."
            )
    if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
        raise ValueError(
            f"config.model.num_kv_heads: {model.num_kv_heads} does not divide num_heads = {model.num_heads}, so "
            "queries cannot share them evenly; 1 is multi-query attention."
        )
    if model.attention == "additive" and model.position in PRODUCT_POSITIONS:
        raise ValueError(
            f"config.model.attention: {model.position!r} positions act through the product of query and key, which "
            "additive attention has not; use another model.position, or attention='dot_product'."
        )
    on_weights = {
        "attention = additive": model.attention == "additive",
        f"attention_dropout = {model.attention_dropout}": model.attention_dropout > 0,
        "relative_values = True": model.position == "relative" and model.relative_values,
    }
    if model.backend not in ("auto", "reference") and any(on_weights.values()):
        what = next(name for name, wanted in on_weights.items() if wanted)
        raise ValueError(f"config.model.backend: {model.backend!r} cannot do model.{what}; use 'reference' or 'auto'.")


def _check_contradictions(config: Config) -> None:
    check_model(config.model)
    data, parallel = config.data, config.parallel
    changed = {name for name, _, _ in differences(Config(), config)}
    for name in sorted(changed & READ_IF.keys()):
        other, wanted = READ_IF[name]
        if getattr(getattr(config, other.split(".")[0]), other.split(".")[1]) != wanted:
            raise ValueError(f"config.{name}: goes with {other}={wanted!r} only; set that, or leave this one out.")
    if not data.buckets or list(data.buckets) != sorted(set(data.buckets)) or data.buckets[0] < 1:
        raise ValueError(f"config.data.buckets: expected increasing positive lengths, got {data.buckets}.")
    if data.buckets[-1] > config.model.max_length:
        raise ValueError(
            f"config.data.buckets: the longest, {data.buckets[-1]}, is over model.max_length = "
            f"{config.model.max_length}; shorten the bucket or raise model.max_length."
        )
    if data.tokens_per_batch < data.buckets[-1] * data.rows_multiple:
        raise ValueError(
            f"config.data.tokens_per_batch: {data.tokens_per_batch} does not hold data.rows_multiple = "
            f"{data.rows_multiple} rows of the longest bucket, {data.buckets[-1]}; it must be at least "
            f"{data.buckets[-1] * data.rows_multiple}."
        )
    if data.rows_multiple % config.optim.accumulate_steps:
        raise ValueError(
            f"config.optim.accumulate_steps: {config.optim.accumulate_steps} does not divide data.rows_multiple "
            f"= {data.rows_multiple}, so a batch cannot be split into equal microbatches; change one of the two."
        )
    if config.model.vocab_size is not None and config.model.vocab_size != data.vocab_size:
        raise ValueError(
            f"config.model.vocab_size: {config.model.vocab_size} contradicts data.vocab_size = "
            f"{data.vocab_size}, what the tokenizer is trained to; leave model.vocab_size unset."
        )
    if data.packing and config.model.architecture != "decoder_lm":
        raise ValueError("config.data.packing: only texts for model.architecture='decoder_lm' are packed so far.")
    if config.decode.top_p is not None and config.decode.top_p > 1:
        raise ValueError(f"config.decode.top_p: expected a share of at most 1, got {config.decode.top_p}.")
    if parallel.data != -1 and parallel.data < 1:
        raise ValueError(f"config.parallel.data: expected -1 (all devices) or at least 1, got {parallel.data}.")
    translated = config.train.best_metric in ("exact_match", "bleu", "chrf")
    if translated and config.model.architecture != "encoder_decoder":
        raise ValueError(
            f"config.train.best_metric: {config.train.best_metric!r} needs translations, and "
            f"model.architecture={config.model.architecture!r} makes none; choose 'loss' or 'accuracy'."
        )
    if translated and config.train.decode_examples == 0:
        raise ValueError(
            f"config.train.best_metric: {config.train.best_metric!r} needs translations, but "
            "train.decode_examples is 0; raise it, or choose 'loss' or 'accuracy'."
        )
