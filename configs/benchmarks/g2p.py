"""Grapheme to phoneme: the letters of a word become its phones, with a vocabulary for each side.

The task of SIGMORPHON 2020 (Gorman 2020), for one of its 15 languages. The scores are the sequence
error rate, the paper's word error rate, and the symbol error rate, its phone error rate.

Data      the public repository sigmorphon/2020, task1/data; benchmarks/g2p.py checks its files and
          names those of a language
Hardware  CPU
Command   python train.py --config=benchmarks/g2p, with files of your own in g2p/; with the public
          data: python -m benchmarks.g2p
Differs   the models of the paper are wider; dropout and label smoothing are near those of
          Wu 2021, "Applying the Transformer to Character-level Transduction"
"""

from flaxformer_lite.config import default_config


def get_config():
    config = default_config()
    config.model.update(d_model=128, num_heads=4, d_ff=512, max_length=64, dropout=0.3)
    config.model.update(num_encoder_layers=3, num_decoder_layers=3, norm_placement="pre")
    config.data.update(dataset="parallel_text", languages=("words", "phones"))
    config.data.update(train_files=("g2p/train.tsv",), validation_files=("g2p/validation.tsv",))
    config.data.update(test_files=("g2p/test.tsv",), tokenizer="char", vocab_size=None)
    config.data.update(target_tokenizer="spaces", pretokenized=True)
    config.data.update(tokens_per_batch=1024, buckets=(64,), num_buckets=4)
    # On dev of Bulgarian, 700 steps of Muon with 2,048 tokens have fewer errors than 1,500 of Adam.
    # On dev of French, 2,800 steps with 1,024 tokens have 8.7 % WER, 1,400 steps 11.3 %, and 700
    # with 2,048 tokens 16.4 %. On dev of Dutch, 2,800 steps with 512 tokens are no better than
    # 1,400 with 1,024 (17.8, 17.3 %).
    config.optim.update(optimizer="muon", schedule="linear", learning_rate=4e-3, warmup_steps=200)
    config.train.update(num_steps=2800, log_every=50, eval_every=200, decode_examples=450)
    config.train.update(best_metric="sequence_error_rate")
    return config
