"""FLOPs of a step: matrix multiplications only, where a multiply-add is 2 FLOPs."""

from typing import TypeVar

import numpy as np

from flaxformer_lite.field_rules import BEAMS
from flaxformer_lite.fields import Config, ModelConfig

Length = TypeVar("Length", int, np.ndarray)  # of one example, or of each of several
GATED = ("reglu", "geglu", "swiglu")  # a third matrix in the feed-forward network


def forward(config: ModelConfig, source_length: Length, target_length: Length) -> Length:
    """Returns the FLOPs of the forward pass on one example, with attention and logits.

    A length that the architecture does not use is ignored. Masks and attention windows save
    nothing here.
    """
    c = config
    d_head = c.d_head or c.d_model // c.num_heads
    width, kv_width = c.num_heads * d_head, (c.num_kv_heads or c.num_heads) * d_head
    feed_forward = (3 if c.activation in GATED else 2) * c.d_model * c.d_ff

    def attention(queries: Length, keys: Length) -> Length:
        """Returns the multiply-adds of the 4 projections, Q K^T, and the weights times V."""
        projections = 2 * c.d_model * (queries * width + keys * kv_width)
        return projections + 2 * width * queries * keys

    # a masked decoder predicts the target length from a symbol in front of the source
    encoded = source_length + (c.decoder == "masked")
    encoder = encoded * feed_forward + attention(encoded, encoded)
    decoder = target_length * feed_forward + attention(target_length, target_length)
    if c.architecture == "encoder_classifier":
        assert c.num_classes is not None, "set by with_classes"
        return 2 * (c.num_encoder_layers * encoder + c.d_model * c.num_classes)
    assert c.output_vocab_size is not None, "set by with_vocabulary"
    logits = target_length * c.d_model * c.output_vocab_size
    if c.architecture == "decoder_lm":
        return 2 * (c.num_decoder_layers * decoder + logits)
    decoder += attention(target_length, source_length)
    logits += c.d_model * c.max_length if c.decoder == "masked" else 0
    return 2 * (c.num_encoder_layers * encoder + c.num_decoder_layers * decoder + logits)


def train_step(config: Config, rows: int, length: int) -> int:
    """Returns the FLOPs of one update on `rows` examples padded to `length`.

    The backward pass has 2 times the FLOPs of the forward pass.
    """
    return 3 * config.train.passes * rows * forward(config.model, length, length)


def decoding(config: Config, rows: int, source_length: int, steps: int) -> int:
    """Returns the FLOPs of `steps` decoding steps on `rows` inputs, over all hypotheses.

    Assumes a full cache: each query attends to `steps` keys. Mask-predict computes all positions of
    all length candidates in each iteration.
    """
    model, decode = config.model, config.decode
    hypotheses = {
        **dict.fromkeys(BEAMS, decode.beam_size),
        "mask_predict": decode.length_candidates * decode.iterations,
    }
    encoder = forward(model, source_length, 0) if model.architecture == "encoder_decoder" else 0
    decoder = forward(model, source_length, steps) - encoder
    return rows * (encoder + hypotheses.get(decode.method, 1) * decoder)


def train_examples(config: Config, source_N: np.ndarray, target_N: np.ndarray) -> float:
    """Returns the FLOPs of one update on examples of these lengths, in tokens, without padding."""
    return 3.0 * config.train.passes * float(np.sum(forward(config.model, source_N, target_N)))
