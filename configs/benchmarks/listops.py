"""ListOps, smaller than in Long Range Arena: the value of nested operators on digits, 10 classes.

Data      listops/256: 96,000 texts of 64 to 256 symbols, generated locally; no download
Hardware  2 CPU cores
Command   python train.py --config=benchmarks/listops
"""

from flaxformer_lite.config import default_config


def get_config():
    config = default_config()
    # 256 symbols between the start and the end symbol
    config.model.update(architecture="encoder_classifier", pooling="first", max_length=258)
    config.model.update(d_model=64, num_heads=4, d_ff=128, num_encoder_layers=4)
    config.model.update(norm_placement="pre", dropout=0.0)
    config.data.update(dataset="listops/256", tokenizer="spaces", vocab_size=None)
    config.data.update(tokens_per_batch=32 * 258, buckets=(258,), num_buckets=4)
    config.optim.update(schedule="linear", learning_rate=1e-3, warmup_steps=200)
    config.train.update(num_steps=1500, label_smoothing=0.0, log_every=50, eval_every=500)
    config.train.update(best_metric="accuracy")
    return config
