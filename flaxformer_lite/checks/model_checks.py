"""Refuses fields that contradict each other: of the model, and of decoding with it."""

from flaxformer_lite.field_rules import CHOICES, PRODUCT_POSITIONS
from flaxformer_lite.fields import DecodeConfig, ModelConfig
from flaxformer_lite.system.errors import InputError


def check_model(model: ModelConfig) -> None:
    """Raises InputError if two fields of the model contradict each other."""
    if model.decoder == "masked" and model.architecture != "encoder_decoder":
        raise InputError(
            "config.model.decoder: 'masked' requires model.architecture='encoder_decoder', "
            f"whose encoder predicts the length; got {model.architecture!r}."
        )
    if model.decoder == "masked" and model.position == "none":
        raise InputError(
            "config.model.position: 'none' cannot distinguish the masked tokens of "
            "model.decoder='masked', which all have the same embedding; choose one of "
            f"{', '.join(each for each in CHOICES['model.position'] if each != 'none')}."
        )
    _check_heads(model)
    _check_attention(model)


def _check_heads(model: ModelConfig) -> None:
    """Raises InputError if the widths do not divide."""
    if model.d_head is None and model.d_model % model.num_heads:
        raise InputError(
            f"config.model.num_heads: {model.num_heads} heads do not divide d_model = "
            f"{model.d_model}; change one of the two, or set model.d_head."
        )
    d_head = model.d_head or model.d_model // model.num_heads
    paired = {"sinusoidal": ("d_model", model.d_model), "rotary": ("d_head", d_head)}
    field, width = paired.get(model.position, ("", 0))
    if width % 2:
        raise InputError(
            f"config.model.{field}: {model.position} positions pair a sine with a cosine and need "
            f"an even width, got {width}; make it even, or use another model.position."
        )
    if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
        raise InputError(
            f"config.model.num_kv_heads: {model.num_kv_heads} does not divide num_heads = "
            f"{model.num_heads}, so queries cannot share them evenly; 1 is multi-query attention."
        )


def _check_attention(model: ModelConfig) -> None:
    """Raises InputError if the position scheme or the backend does not support the attention."""
    if model.attention == "additive" and model.position in PRODUCT_POSITIONS:
        raise InputError(
            f"config.model.attention: {model.position!r} positions act through the product of "
            "query and key, which additive attention does not compute; use another "
            "model.position, or attention='dot_product'."
        )
    needs_weights = {
        "attention = additive": model.attention == "additive",
        f"attention_dropout = {model.attention_dropout}": model.attention_dropout > 0,
        "relative_values = True": model.position == "relative" and model.relative_values,
    }
    if model.backend not in ("auto", "reference") and any(needs_weights.values()):
        setting = next(name for name, is_set in needs_weights.items() if is_set)
        raise InputError(
            f"config.model.backend: {model.backend!r} does not support model.{setting}; use "
            "'reference' or 'auto'."
        )


def check_method(model: ModelConfig, decode: DecodeConfig) -> None:
    """Raises InputError if the model does not support the decoding method or its options."""
    if model.decoder == "masked" and decode.method != "mask_predict":
        raise InputError(
            f"config.decode.method: {decode.method!r} generates token by token, and a model with "
            "model.decoder='masked' is not trained for that; use decode.method='mask_predict'."
        )
    if model.decoder != "masked" and decode.method == "mask_predict":
        raise InputError(
            "config.decode.method: 'mask_predict' fills in masked tokens, and a model with "
            "model.decoder='causal' is not trained for that; use model.decoder='masked', or "
            "another decode.method."
        )
    if decode.top_p is not None and decode.top_p > 1:
        raise InputError(f"config.decode.top_p: expected a share of at most 1, got {decode.top_p}.")
    if decode.method == "diverse_beam" and decode.beam_size % decode.beam_groups:
        raise InputError(
            f"config.decode.beam_groups: {decode.beam_groups} groups do not divide "
            f"decode.beam_size = {decode.beam_size} evenly; change one of the two."
        )
    if decode.forbidden and decode.method == "mask_predict":
        raise InputError(
            "config.decode.forbidden: 'mask_predict' predicts all tokens at once, so it cannot "
            "exclude one by those before it; leave it unset."
        )
    if blank := [text for text in decode.forbidden if not text.strip()]:
        raise InputError(
            f"config.decode.forbidden: expected words or phrases, got {blank[0]!r}; leave it out."
        )
    if decode.no_repeat_ngram is not None and decode.method == "mask_predict":
        raise InputError(
            "config.decode.no_repeat_ngram: 'mask_predict' predicts all tokens at once, so it "
            "cannot exclude one by those before it; leave it unset."
        )
