"""Multi30k, English to German: captions of pictures, cased and untokenised, as people write them.

Data      29,000 pairs to train on, 1,014 to validate, 1,000 to test (2016 Flickr): data/task1/raw of the public
          repository multi30k/dataset, for non-commercial research. Put train.en.gz, train.de.gz, val.en.gz, val.de.gz,
          test_2016_flickr.en.gz and test_2016_flickr.de.gz into multi30k/raw/ below the folder that you train in, or
          name them: --config.data.train_files=A,B and so on
Expected  34.3 sacreBLEU on the validation and 34.3 on the test, greedy, after 10 minutes on 2 cores of an AMD EPYC, a
          device for each; 35.7 on the test with beam search, the second command. For more, train longer: multi30k_tok
Command   python train.py --config=multi30k --workdir=runs/multi30k
          flaxformer-lite evaluate --workdir=runs/multi30k --method=beam --beam_size=5 --alpha=1
          On a CPU of two cores, a device for each: XLA_FLAGS="--xla_cpu_multi_thread_eigen=false
          --xla_force_host_platform_device_count=2" before it
"""

from flaxformer_lite.config import default_config

FILES = ("multi30k/raw/{}.en*", "multi30k/raw/{}.de*")


def get_config():
    config = default_config()
    config.model.update(d_model=128, num_heads=4, d_ff=256, num_encoder_layers=4, num_decoder_layers=4, max_length=128)
    config.model.update(norm_placement="pre")
    config.data.update(dataset="parallel_text", tokenizer="bpe", vocab_size=10_000)
    config.data.update(train_files=files("train"), validation_files=files("val"), test_files=files("test_2016_flickr"))
    config.data.update(tokens_per_batch=2048, num_buckets=6, buckets=(64,))
    config.optim.update(schedule="linear", learning_rate=4e-3, warmup_steps=400)
    config.train.update(num_steps=1800, log_every=50, eval_every=600)
    config.train.update(ema_decay=0.995, decode_examples=1014, best_metric="bleu")
    return config


def files(split):
    """The English file of a split and the German one, gzip or not."""
    return tuple(path.format(split) for path in FILES)
