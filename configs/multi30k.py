"""Multi30k, English to German: image captions with original case, not tokenised.

Data      29,000 training pairs, 1,014 validation, 1,000 test (2016 Flickr): data/task1/raw of the
          public repository multi30k/dataset, for non-commercial research. Put train.en.gz,
          train.de.gz, val.en.gz, val.de.gz, test_2016_flickr.en.gz and test_2016_flickr.de.gz into
          multi30k/raw/ below the working directory, or name them:
          --config.data.train_files=A,B and so on
Hardware  2 cores of an AMD EPYC, with one device each
Time      10 minutes
Expected  34.3 sacreBLEU on validation and 34.3 on test, greedy; 35.7 on test with beam search, the
          second command. multi30k_tok trains longer
Command   python train.py --config=multi30k --workdir=runs/multi30k
          flaxformer-lite evaluate --workdir=runs/multi30k --method=beam --beam_size=5 --alpha=1
          On 2 CPU cores, with one device each, precede it by:
          XLA_FLAGS="--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=2"
"""

from flaxformer_lite.config import default_config

FILES = ("multi30k/raw/{}.en*", "multi30k/raw/{}.de*")


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
    config.model.update(norm_placement="pre")
    config.data.update(dataset="parallel_text", tokenizer="bpe", vocab_size=10_000)
    config.data.update(
        train_files=files("train"),
        validation_files=files("val"),
        test_files=files("test_2016_flickr"),
    )
    config.data.update(tokens_per_batch=2048, num_buckets=6, buckets=(64,))
    config.optim.update(schedule="linear", learning_rate=4e-3, warmup_steps=400)
    config.train.update(num_steps=1800, log_every=50, eval_every=600)
    config.train.update(ema_decay=0.995, decode_examples=1014, best_metric="bleu")
    return config


def files(split):
    """Returns the English and the German file of a split, gzip or not."""
    return tuple(path.format(split) for path in FILES)
