"""Valid values of the fields, fields that need others, and fields that a later start may change."""

import dataclasses

from flaxformer_lite.fields import ModelConfig

# of sacreBLEU
BLEU_TOKENIZERS = ("13a", "zh", "char", "intl", "ja-mecab", "ko-mecab", "flores200", "spm")
ERROR_RATES = ("symbol_error_rate", "sequence_error_rate")  # in percent; see scores/symbols.py
EXTERNAL = ("external_score", "external_error")  # of `train.metric_command`
OF_TEXT = ("bits_per_byte", "bits_per_character", "nats_per_character")  # of language models
# Metrics of an evaluation that are better if they are lower; all others are better if higher.
LOWER_IS_BETTER = ("loss", "perplexity", *OF_TEXT, *ERROR_RATES, "external_error")

# Kinds of tokenizers: trained as SentencePiece models; with the symbols of all training texts,
# counted; read from `data.tokenizer_file`.
SUBWORDS = ("unigram", "bpe")
COUNTED = ("char", "word", "spaces")
FROM_FILE = ("sentencepiece", "huggingface")
TARGET_TOKENIZERS = (*SUBWORDS, *COUNTED, "byte", *FROM_FILE)
TOKENIZERS = (*TARGET_TOKENIZERS, "marian")
BYTE_VOCABULARY = 260  # 256 bytes and 4 special tokens

# Methods of decoding with several hypotheses and n-best lists, and those with random samples.
BEAMS = ("beam", "diverse_beam", "stochastic_beam")
RANDOM = ("sample", "stochastic_beam")

CHOICES = {
    "model.architecture": ("encoder_decoder", "encoder_classifier", "decoder_lm"),
    "model.position": ("sinusoidal", "learned", "rotary", "relative", "t5_bias", "alibi", "none"),
    "model.attention": ("dot_product", "additive"),
    "model.backend": ("auto", "reference", "blockwise", "xla", "cudnn", "flash"),
    "model.norm": ("layer_norm", "rms_norm"),
    "model.decoder": ("causal", "masked"),
    "model.activation": ("relu", "gelu", "gelu_tanh", "silu", "reglu", "geglu", "swiglu"),
    "model.pooling": ("mean", "first"),
    "model.norm_placement": ("post", "pre"),
    "model.remat": ("none", "dots", "full"),
    "model.dtype": ("float32", "bfloat16"),
    "data.tokenizer": TOKENIZERS,
    "data.target_tokenizer": TARGET_TOKENIZERS,
    "data.vocab_limit": ("hard", "soft"),
    "data.faults": ("refuse", "drop"),
    "optim.optimizer": ("adam", "adamw", "lion", "adafactor", "muon", "sgd", "schedule_free"),
    "optim.schedule": ("paper", "inverse_sqrt", "linear", "cosine", "wsd", "constant"),
    "data.normalization": ("none", "whitespace", "nfc", "nfkc"),
    "data.bleu_tokenizer": BLEU_TOKENIZERS,
    "train.best_metric": (
        *("loss", "accuracy", "exact_match", "bleu", "chrf", "bleu_tokenized"),
        *ERROR_RATES,
        *EXTERNAL,
    ),
    "train.metric_name": EXTERNAL,
    "decode.method": ("greedy", "sample", *BEAMS, "mask_predict"),
    "decode.penalty": ("wu", "power"),
    "parallel.mode": ("mesh", "pmap"),
    "init.parameters": ("raw", "ema"),
    "init.missing": ("refuse", "random"),
    "init.vocabulary": ("same", "extend"),
    "init.new_embeddings": ("mean", "random"),
}
# Values of data.dataset that read custom files.
OWN_TEXT = ("parallel_text", "plain_text", "labelled_text")
# Position schemes that act on the product query . key, which additive attention does not compute.
PRODUCT_POSITIONS = ("rotary", "relative")
# Inclusive lowest values; a field that is not listed may be any number of its type.
AT_LEAST_ONE = """
    model.d_model model.num_heads model.num_kv_heads model.d_head model.d_ff model.max_length
    model.num_encoder_layers model.num_decoder_layers model.relative_clip model.attention_window
    data.tokens_per_batch data.rows_multiple data.vocabulary_sample data.longest_line
    data.num_buckets data.windows optim.warmup_steps optim.decay_steps optim.accumulate_steps
    train.num_steps train.log_every train.eval_every train.checkpoint_every train.keep_newest
    train.patience
    decode.top_k decode.beam_size decode.no_repeat_ngram decode.iterations decode.length_candidates
    decode.tokens_per_batch decode.beam_groups
""".split()
AT_LEAST_ZERO = """
    train.alignment_layer train.alignment_head
    train.keep_best train.decode_examples decode.max_extra_length decode.min_length
    data.seed train.seed decode.seed optim.nan_tolerance
""".split()
LOWEST = {
    **dict.fromkeys(AT_LEAST_ONE, 1),
    **dict.fromkeys(AT_LEAST_ZERO, 0),
    "model.num_classes": 2,
    "model.vocab_size": 8,
    # 4 special tokens and a symbol
    **dict.fromkeys(("model.target_vocab_size", "data.target_vocab_size"), 5),
    "data.vocab_size": 8,
    "data.character_coverage": 0.98,  # SentencePiece's bound
    **dict.fromkeys(("decode.alpha", "decode.diversity"), 0.0),
    "train.r_drop": 0.0,
    "train.z_loss": 0.0,
    "train.guided_alignment": 0.0,
    "init.new_bias": -100.0,
    "optim.weight_decay": 0.0,
}
HIGHEST = {  # inclusive
    **dict.fromkeys(("data.seed", "train.seed", "decode.seed"), 2**32 - 1),
    "decode.alpha": 10.0,  # the length penalty of 7,000 tokens still fits in a float32
    "decode.diversity": 100.0,
    "train.r_drop": 100.0,
    "train.z_loss": 1.0,
    "train.guided_alignment": 100.0,
    "data.character_coverage": 1.0,
    "init.new_bias": 0.0,
    **dict.fromkeys(("decode.max_extra_length", "decode.min_length"), 2**20),
    **dict.fromkeys(("decode.beam_size", "decode.iterations", "decode.length_candidates"), 1000),
}
POSITIVE = """
    model.norm_epsilon model.rope_base optim.learning_rate optim.eps optim.clip_norm
    optim.skip_spikes train.metric_seconds decode.temperature decode.top_p
""".split()
BELOW_ONE = """
    model.dropout model.attention_dropout model.feed_forward_dropout model.embedding_dropout
    model.layer_drop train.label_smoothing train.ema_decay optim.b1 optim.b2 optim.momentum
    optim.final_rate data.subword_sampling decode.epsilon
""".split()

# Fields that have an effect only if another field has one of these values.
READ_IF: dict[str, tuple[str, tuple[str | bool, ...]]] = {
    **dict.fromkeys(
        ("model.relative_clip", "model.relative_values"), ("model.position", ("relative",))
    ),
    "model.rope_base": ("model.position", ("rotary",)),
    "model.pooling": ("model.architecture", ("encoder_classifier",)),
    "data.target_tokenizer": ("model.architecture", ("encoder_decoder",)),
    **dict.fromkeys(
        ("model.target_vocab_size", "data.target_vocab_size", "data.target_tokenizer_file"),
        ("data.target_tokenizer", TARGET_TOKENIZERS),
    ),
    "optim.decay_steps": ("optim.schedule", ("wsd",)),
    "optim.final_rate": ("optim.schedule", ("cosine", "wsd")),
    **dict.fromkeys(
        ("optim.b1", "optim.b2"),
        ("optim.optimizer", ("adam", "adamw", "lion", "muon", "schedule_free")),
    ),
    "optim.eps": ("optim.optimizer", ("adam", "adamw", "muon", "schedule_free")),
    "optim.momentum": ("optim.optimizer", ("sgd", "muon")),
    "data.num_buckets": ("data.packing", (False,)),
    "data.windows": ("model.architecture", ("decoder_lm",)),
    "train.r_drop": ("model.decoder", ("causal",)),
    "data.pretokenized": ("model.architecture", ("encoder_decoder",)),
    "data.bleu_tokenizer": ("model.architecture", ("encoder_decoder",)),
    **dict.fromkeys(
        ("decode.temperature", "decode.top_k", "decode.top_p", "decode.epsilon"),
        ("decode.method", ("sample",)),
    ),
    "decode.seed": ("decode.method", RANDOM),
    "decode.beam_size": ("decode.method", BEAMS),
    **dict.fromkeys(
        ("decode.alpha", "decode.penalty"), ("decode.method", ("beam", "diverse_beam"))
    ),
    **dict.fromkeys(
        ("decode.beam_groups", "decode.diversity"), ("decode.method", ("diverse_beam",))
    ),
    **dict.fromkeys(
        ("decode.iterations", "decode.length_candidates"), ("decode.method", ("mask_predict",))
    ),
    **dict.fromkeys(("init.new_embeddings", "init.new_bias"), ("init.vocabulary", ("extend",))),
}

# `optim.momentum` of None, by optimizer.
MOMENTUM = {"sgd": 0.9, "muon": 0.95}

# Fields of `train` that a resumed run may change. They do not affect earlier steps. Later steps
# stay the same too, except under another model.backend or model.remat (rounding), and under the
# schedules 'linear', 'cosine' and 'wsd', which end at the new train.num_steps.
RESUMED = """
    num_steps log_every eval_every checkpoint_every keep_newest keep_best average patience
    decode_examples profile metric_command metric_name metric_seconds
""".split()
# Fields of the model that make a training step random; inference ignores them.
DROPOUTS = tuple(
    "dropout attention_dropout feed_forward_dropout embedding_dropout layer_drop".split()
)
# Fields that imported weights fix before the first step; all others may still change.
NOT_IN_WEIGHTS = (*DROPOUTS, "dtype", "remat", "backend")
FIXED_BY_WEIGHTS = (
    "data.tokenizer",
    "data.target_tokenizer",
    "data.vocab_size",
    "data.vocab_limit",
    *(
        f"model.{each.name}"
        for each in dataclasses.fields(ModelConfig)
        if each.name not in NOT_IN_WEIGHTS
    ),
)
MAY_DIFFER_ON_RESUME = (
    "parallel.",
    "decode.",
    "data.bleu_tokenizer",
    "data.train_files",  # files are known by their contents
    "data.validation_files",
    "data.test_files",
    "data.train_alignments",
    "data.tokenizer_file",  # as is a tokenizer
    "data.target_tokenizer_file",
    "init.run",  # and a parent
    "model.backend",
    "model.remat",
    *(f"train.{name}" for name in RESUMED),
)
