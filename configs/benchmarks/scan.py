"""SCAN: commands such as 'jump left and walk' become actions (Lake and Baroni 2018).

Words in, actions out; each is a token of one vocabulary. The score is the sequence error rate: 100
minus it is the accuracy of the paper.

Data      the public repository brendenlake/SCAN; benchmarks/scan.py checks its files, holds out
          500 examples for validation, and writes a file of each part
Hardware  CPU
Command   python train.py --config=benchmarks/scan, with files of your own in scan/; with the
          public data: python -m benchmarks.scan
Differs   the paper has recurrent networks; the size is near that of Csordas 2021
"""

from flaxformer_lite.config import default_config


def get_config():
    config = default_config()
    config.model.update(d_model=128, d_ff=256, max_length=64)
    config.model.update(num_encoder_layers=2, num_decoder_layers=2, norm_placement="pre")
    config.data.update(dataset="parallel_text", languages=("commands", "actions"))
    config.data.update(train_files=("scan/train.tsv",), validation_files=("scan/validation.tsv",))
    config.data.update(test_files=("scan/test.tsv",), tokenizer="spaces", vocab_size=None)
    config.data.update(tokens_per_batch=2048, buckets=(64,), num_buckets=6, pretokenized=True)
    config.optim.update(schedule="linear", learning_rate=2e-3, warmup_steps=200)
    config.train.update(num_steps=2000, label_smoothing=0.0, eval_every=500, decode_examples=500)
    # The last parameters, not the best ones: validation has no output of new length or with a new
    # combination, and its loss does not predict the accuracy on those (Csordas 2021).
    config.train.update(average="last:1", log_every=50)
    return config
