"""The base model of "Attention Is All You Need" on WMT14 English-German; sections 3, 5 and 6.1, Table 3.

Data      WMT14 En-De, 4.5 million pairs, prepared once by TFDS as ArrayRecord (that step needs TensorFlow)
Hardware  the paper: 8 P100 GPUs, 12 hours for 100,000 steps
Expected  the paper: 27.3 BLEU (tokenised) with the last 5 checkpoints averaged, beam 4, alpha 0.6. Not yet measured
          here
Command   python train.py --config=base --workdir=runs/base
"""

from flaxformer_lite.config import default_config


def get_config():
    config = default_config()  # the defaults are this model: d_model 512, 8 heads, d_ff 2048, 6 + 6 layers, dropout 0.1
    config.data.update(dataset="wmt14_translate/de-en", source_language="en", tokenizer="bpe")
    config.train.update(keep_newest=5, average="last:5")
    config.decode.update(method="beam")
    return config
