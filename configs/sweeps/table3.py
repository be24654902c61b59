r"""Table 3 of the paper: variations of the base model, one at a time, and the big model.

Data      the small task of `default`: CLDR phrases, English to German; or your own files, as below
Scale     1/8 of the paper's widths and 1/2 of its layers. The rows keep the paper's ratios to the
          base model: --config.model.d_model=128 doubles the widths of all rows
Hardware  2 CPU cores, 52 minutes for 20 points, while another sweep used half of them
Differs   (B) changes the size of values with that of keys; the paper leaves values at 64. The base
          trains for 300 steps, not 100,000; the big model for 3 times as many, as in the paper
Command   flaxformer-lite sweep --sweep=table3 --workdir=sweeps/table3
Multi30k  the same with --config.data.dataset=parallel_text
          --config.data.train_files=multi30k/raw/train.en.gz,\ multi30k/raw/train.de.gz and so on
          for validation_files and test_files, --config.data.vocab_size=8000
"""

from flaxformer_lite.config import default_config

SWEEP = {"objective": "perplexity", "columns": ("bleu", "loss")}
BASE_WIDTH, BASE_LAYERS = 512, 6  # of the paper
# Row, changes (sizes of the paper), perplexity and BLEU on the development set, and millions of
# parameters.
PAPER = [
    ("base", {}, 4.92, 25.8, 65),
    ("(A) h=1", {"num_heads": 1, "d_head": 512}, 5.29, 24.9, None),
    ("(A) h=4", {"num_heads": 4, "d_head": 128}, 5.00, 25.5, None),
    ("(A) h=16", {"num_heads": 16, "d_head": 32}, 4.91, 25.8, None),
    ("(A) h=32", {"num_heads": 32, "d_head": 16}, 5.01, 25.4, None),
    ("(B) d_k=16", {"d_head": 16}, 5.16, 25.1, 58),
    ("(B) d_k=32", {"d_head": 32}, 5.01, 25.4, 60),
    ("(C) N=2", {"layers": 2}, 6.11, 23.7, 36),
    ("(C) N=4", {"layers": 4}, 5.19, 25.3, 50),
    ("(C) N=8", {"layers": 8}, 4.88, 25.5, 80),
    ("(C) d=256", {"d_model": 256, "d_head": 32}, 5.75, 24.5, 28),
    ("(C) d=1024", {"d_model": 1024, "d_head": 128}, 4.66, 26.0, 168),
    ("(C) d_ff=1024", {"d_ff": 1024}, 5.12, 25.4, 53),
    ("(C) d_ff=4096", {"d_ff": 4096}, 4.75, 26.2, 90),
    ("(D) dropout 0", {"dropout": 0.0}, 5.77, 24.6, None),
    ("(D) dropout 0.2", {"dropout": 0.2}, 4.95, 25.5, None),
    ("(D) smoothing 0", {"label_smoothing": 0.0}, 4.67, 25.3, None),
    ("(D) smoothing 0.2", {"label_smoothing": 0.2}, 5.47, 25.7, None),
    ("(E) learned", {"position": "learned"}, 4.92, 25.7, None),
    (
        "big",
        {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3, "steps": 3},
        4.33,
        26.4,
        213,
    ),
]
SIZES = ("d_model", "d_ff", "d_head")


def get_config():
    config = default_config()
    config.model.update(
        d_model=64,
        num_heads=8,
        d_ff=256,
        num_encoder_layers=3,
        num_decoder_layers=3,
        max_length=128,
    )
    config.data.update(tokenizer="bpe", vocab_size=2000, tokens_per_batch=2048, buckets=(16, 40))
    config.data.update(validation_split="validation[:500]", test_split="test[:100]")
    config.optim.update(schedule="linear", learning_rate=3e-3, warmup_steps=100)
    config.train.update(
        num_steps=300, log_every=10, eval_every=100, checkpoint_every=50, decode_examples=200
    )
    return config


def points(config):
    return [
        {
            "row": row,
            "paper ppl": perplexity,
            "paper bleu": bleu,
            "paper M": millions,
            **fields_of(config, changes),
        }
        for row, changes, perplexity, bleu, millions in PAPER
    ]


def fields_of(config, changes):
    """Returns the fields of a row, with the paper's widths and depths scaled to `config`."""
    width, depth = BASE_WIDTH / config.model.d_model, BASE_LAYERS / config.model.num_encoder_layers
    fields = {
        f"model.{name}": max(1, round(changes[name] / width)) for name in SIZES if name in changes
    }
    for name, value in changes.items():
        if name == "layers":
            fields |= dict.fromkeys(
                ("model.num_encoder_layers", "model.num_decoder_layers"), round(value / depth)
            )
        elif name == "steps":
            fields["train.num_steps"] = value * config.train.num_steps
        elif name == "label_smoothing":
            fields["train.label_smoothing"] = value
        elif name not in SIZES:
            fields[f"model.{name}"] = value
    return fields
