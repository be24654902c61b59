"""How much arithmetic a step is: matrix multiplications only, a multiply-add counted as two."""

import numpy as np

from flaxformer_lite.config import Config, ModelConfig

GATED = ("reglu", "geglu", "swiglu")  # a third matrix in the feed-forward network


def forward(config: ModelConfig, source_length: int, target_length: int) -> int:
    """FLOPs of the forward pass over one example of these lengths, attention and logits included.

    A side that the model's shape does not read does not count; neither do a mask's or a window's savings.
    """
    c = config
    d_head = c.d_head or c.d_model // c.num_heads
    width, kv_width = c.num_heads * d_head, (c.num_kv_heads or c.num_heads) * d_head
    feed_forward = (3 if c.activation in GATED else 2) * c.d_model * c.d_ff

    def attention(queries: int, keys: int) -> int:
        """Projections of queries and output, of keys and values, then Q K^T and the weights times V."""
        projections = 2 * c.d_model * (queries * width + keys * kv_width)
        return projections + 2 * width * queries * keys

    encoded = source_length + (c.decoder == "masked")  # a symbol in front, which tells the target's length
    encoder = encoded * feed_forward + attention(encoded, encoded)
    decoder = target_length * feed_forward + attention(target_length, target_length)
    if c.architecture == "encoder_classifier":
        return 2 * (c.num_encoder_layers * encoder + c.d_model * c.num_classes)
    logits = target_length * c.d_model * c.vocab_size
    if c.architecture == "decoder_lm":
        return 2 * (c.num_decoder_layers * decoder + logits)
    decoder += attention(target_length, source_length)
    logits += c.d_model * c.max_length if c.decoder == "masked" else 0
    return 2 * (c.num_encoder_layers * encoder + c.num_decoder_layers * decoder + logits)


def train_step(config: Config, rows: int, length: int) -> int:
    """FLOPs of one update on `rows` examples padded to `length`: the backward pass is twice the forward."""
    return 3 * config.train.passes * rows * forward(config.model, length, length)


def decoding(config: Config, rows: int, source_length: int, steps: int) -> int:
    """FLOPs of `steps` decoding steps on `rows` inputs, with all hypotheses or candidates of an input.

    Assumes a cache of full size: each query sees `steps` keys. Mask-predict passes over all positions at once, in each
    of its iterations.
    """
    model, decode = config.model, config.decode
    hypotheses = {"beam": decode.beam_size, "mask_predict": decode.length_candidates * decode.iterations}
    encoder = forward(model, source_length, 0) if model.architecture == "encoder_decoder" else 0
    decoder = forward(model, source_length, steps) - encoder
    return rows * (encoder + hypotheses.get(decode.method, 1) * decoder)


def train_examples(config: Config, source_N: np.ndarray, target_N: np.ndarray) -> float:
    """FLOPs of one update on examples of these lengths, in tokens, as if none were padded."""
    return 3.0 * config.train.passes * float(np.sum(forward(config.model, source_N, target_N)))
