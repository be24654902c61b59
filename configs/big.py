"""The big model of "Attention Is All You Need" on WMT14 English-German (sections 5.2 and 6.1).

Data      WMT14 En-De, 4.5 million pairs, prepared once by TFDS as ArrayRecord, with TensorFlow
Hardware  the paper: 8 P100 GPUs, 3.5 days for 300,000 steps
Expected  the paper, Table 3: 28.4 BLEU (tokenised) with the last 20 checkpoints averaged, beam 4,
          alpha 0.6; not yet trained here
Command   python train.py --config=big --workdir=runs/big
"""

from flaxformer_lite.config import default_config


def get_config():
    config = default_config()
    config.model.update(d_model=1024, num_heads=16, d_ff=4096, dropout=0.3)
    config.data.update(dataset="wmt14_translate/de-en", source_language="en", tokenizer="bpe")
    config.train.update(num_steps=300_000, keep_newest=20, average="last:20")
    config.decode.update(method="beam")
    return config
