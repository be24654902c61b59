"""A tiny run for the documentation, the tests and CI: fast, with poor translations.

Data      5,000 phrases of cldr_translate/en-de
Hardware  2 CPU cores
Time      25 seconds with cold caches, half of that with warm ones
Command   python train.py --config=smoke
"""

from flaxformer_lite.config import default_config


def get_config():
    config = default_config()
    config.model.update(
        d_model=64, d_ff=128, num_encoder_layers=2, num_decoder_layers=2, max_length=128
    )
    config.data.update(
        train_split="train[:5000]", validation_split="validation[:200]", test_split="test[:100]"
    )
    config.data.update(vocab_size=1024, tokens_per_batch=1024, buckets=(16, 40))
    config.optim.update(schedule="inverse_sqrt", learning_rate=4e-3, warmup_steps=20)
    config.train.update(
        num_steps=50, log_every=1, eval_every=20, checkpoint_every=10, decode_examples=16
    )
    return config
