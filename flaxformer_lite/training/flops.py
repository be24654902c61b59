"""How much arithmetic a step is: matrix multiplications only, a multiply-add counted as two."""

from flaxformer_lite.config import ModelConfig


def forward(config: ModelConfig, source_length: int, target_length: int) -> int:
    """FLOPs of the forward pass over one sentence pair of these lengths, attention and logits included."""
    c = config
    width = c.num_heads * (c.d_head or c.d_model // c.num_heads)
    feed_forward = 2 * c.d_model * c.d_ff
    attention = 4 * c.d_model * width  # query, key, value and output projections

    def mixing(queries: int, keys: int) -> int:
        return 2 * width * queries * keys  # Q K^T, and the weights times V

    encoder = source_length * (attention + feed_forward) + mixing(source_length, source_length)
    cross = (target_length + source_length) * attention // 2 + mixing(target_length, source_length)
    own = target_length * (attention + feed_forward) + mixing(target_length, target_length)
    logits = target_length * c.d_model * c.vocab_size
    return 2 * (c.num_encoder_layers * encoder + c.num_decoder_layers * (cross + own) + logits)


def train_step(config: ModelConfig, rows: int, length: int) -> int:
    """FLOPs of one update on `rows` pairs padded to `length`: the backward pass is twice the forward."""
    return 3 * rows * forward(config, length, length)
