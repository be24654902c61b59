"""The base model of "Attention Is All You Need" on WMT14 English-German (sections 3, 5, 6.1).

Data      WMT14 En-De, 4.5 million pairs, prepared once by TFDS as ArrayRecord, with TensorFlow
Hardware  the paper: 8 P100 GPUs, 12 hours for 100,000 steps
Expected  the paper, Table 3: 27.3 BLEU (tokenised) with the last 5 checkpoints averaged, beam 4,
          alpha 0.6; not yet trained here
Command   python train.py --config=base --workdir=runs/base
"""

from flaxformer_lite.config import default_config


def get_config():
    # The defaults are this model: d_model 512, 8 heads, d_ff 2048, 6 + 6 layers, dropout 0.1.
    config = default_config()
    config.data.update(dataset="wmt14_translate/de-en", source_language="en", tokenizer="bpe")
    config.train.update(keep_newest=5, average="last:5")
    config.decode.update(method="beam")
    return config
