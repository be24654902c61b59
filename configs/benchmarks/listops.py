"""ListOps at an eighth of the length of Long Range Arena: the value of nested operators on digits.

A small encoder and 10 classes, one a digit.

Data      listops/256: 96,000 texts of 64 to 256 symbols, generated locally in 2 minutes; no
          download. docs/guides/data.md lists what differs from Long Range Arena (Tay 2021)
Hardware  2 CPU cores
Time      15 minutes on one core beside other work
Expected  34.6 % accuracy on the test split (seed 0); the most frequent digit has 15.3 %
Command   python train.py --config=benchmarks/listops

One GPU, the lengths of Long Range Arena, and the size and steps of its base config; not run yet:

    python train.py --config=benchmarks/listops --config.data.dataset=listops/2000
      --config.model.max_length=2002 --config.model.d_model=512 --config.model.num_heads=8
      --config.model.d_ff=2048 --config.model.num_encoder_layers=6 --config.model.dtype=bfloat16
      --config.data.buckets=(2002,) --config.data.tokens_per_batch=64064
      --config.optim.optimizer=adamw --config.optim.weight_decay=0.1
      --config.optim.schedule=inverse_sqrt --config.optim.learning_rate=1.6e-3
      --config.optim.warmup_steps=1000 --config.train.num_steps=5000
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
    config.train.update(num_steps=2000, label_smoothing=0.0, log_every=50, eval_every=500)
    config.train.update(best_metric="accuracy")
    return config
