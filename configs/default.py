"""The main job: a small Transformer of the paper learns to translate CLDR phrases from English to German.

Data      cldr_translate/en-de, made on the machine; no download
Command   python train.py
"""

from flaxformer_lite.config import default_config


def get_config():
    config = default_config()
    config.model.update(d_model=128, num_heads=4, d_ff=512, num_encoder_layers=2, num_decoder_layers=2, max_length=128)
    config.data.update(vocab_size=2000, tokens_per_batch=4096, buckets=(32, 64))
    config.optim.update(schedule="inverse_sqrt", learning_rate=2e-3, warmup_steps=400)
    config.train.update(num_steps=3000, log_every=50, eval_every=500, checkpoint_every=500)
    return config
