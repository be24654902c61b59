"""Multi30k as in publications: English to German, lower-cased, tokenised; Transformer-Tiny.

Data      29,000 training pairs, 1,014 validation, 1,000 test (2016 Flickr): data/task1/tok of the
          public repository multi30k/dataset, for non-commercial research. Put the files train, val
          and test_2016_flickr, each with the endings .lc.norm.tok.en and .lc.norm.tok.de, into
          multi30k/tok/ below the working directory, or name them:
          --config.data.train_files=A,B and so on
Hardware  2 CPU cores
Time      88 minutes
Expected  41.63 BLEU on tokenised test text (seeds 0 to 2: 41.57, 41.62, 41.69), 42.23 on
          validation; an ensemble of two seeds 42.30. Published for this model without images:
          41.02 (Wu 2021). See docs/results/multi30k_tok.md for more
Command   python train.py --config=multi30k_tok
          On 2 CPU cores, with one device each, precede it by:
          XLA_FLAGS="--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=2"
"""

from flaxformer_lite.config import default_config

FILES = ("multi30k/tok/{}.lc.norm.tok.en*", "multi30k/tok/{}.lc.norm.tok.de*")


def get_config():
    config = default_config()
    config.model.update(
        d_model=128,
        num_heads=4,
        d_ff=256,
        num_encoder_layers=4,
        num_decoder_layers=4,
        max_length=128,
    )
    config.model.update(norm_placement="pre", dropout=0.2)
    config.data.update(
        dataset="parallel_text", pretokenized=True, tokenizer="bpe", vocab_size=10_000
    )
    config.data.update(
        train_files=files("train"),
        validation_files=files("val"),
        test_files=files("test_2016_flickr"),
    )
    config.data.update(
        tokens_per_batch=2048, buckets=(11, 13, 14, 15, 16, 17, 18, 19, 20, 22, 24, 28, 36, 64)
    )
    config.optim.update(schedule="linear", learning_rate=4e-3, warmup_steps=800)
    config.train.update(num_steps=9000, r_drop=3.0, log_every=50, eval_every=1000)
    config.train.update(ema_decay=0.999, decode_examples=1014, best_metric="bleu_tokenized")
    config.decode.update(method="beam", beam_size=5, alpha=1.0)
    return config


def files(split):
    """Returns the English and the German file of a split, gzip or not."""
    return tuple(path.format(split) for path in FILES)
