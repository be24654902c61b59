"""Every setting, its default and its valid values, as frozen dataclasses.

The defaults are the base model of "Attention Is All You Need" (sections 3, 5 and 6.1).
The comment above a field states its meaning, unit and source.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of the Transformer.

    A section, table or equation without an author is of "Attention Is All You Need".
    """

    # both stacks, section 3.1; only the encoder (Devlin 2019); only the decoder (Radford 2018)
    architecture: str = "encoder_decoder"
    # attends to earlier tokens, section 3.2.3; 'masked': to all (Ghazvininejad 2019, section 2)
    decoder: str = "causal"
    # number of token ids; None: the tokenizer's; section 5.1
    vocab_size: int | None = None
    # width of the embeddings and of each layer's input and output; section 3.1
    d_model: int = 512
    # attention heads; section 3.2.2
    num_heads: int = 8
    # key and value heads, each shared by a group of queries (Ainslie 2023); None: num_heads
    num_kv_heads: int | None = None
    # width of a head's queries, keys and values; None: d_model / num_heads; section 3.2.2
    d_head: int | None = None
    # inner width of the feed-forward network; section 3.3
    d_ff: int = 2048
    # layers of the encoder; section 3.1
    num_encoder_layers: int = 6
    # layers of the decoder; section 3.1
    num_decoder_layers: int = 6
    # longest source or target, in tokens, end symbol included; section 3.5
    max_length: int = 256
    # position scheme; section 3.5; model/positions.py lists the source of each scheme
    position: str = "sinusoidal"
    # 'rotary': longest wavelength, divided by 2 pi (Su 2021, section 3.2.2)
    rope_base: float = 10000.0
    # 'relative': longer distances share one vector (Shaw 2018, section 3.2)
    relative_clip: int = 16
    # 'relative': vectors are added to the values too (Shaw 2018, equation 3)
    relative_values: bool = False
    # how queries and keys are compared; section 3.2.1; 'additive' (Bahdanau 2015, appendix A.1.2)
    attention: str = "dot_product"
    # largest distance, in tokens, that self-attention covers; None: no limit; section 4
    attention_window: int | None = None
    # implementation of attention; all have the same result; section 3.2.1; model/backends.py
    backend: str = "auto"
    # normalisation of activations; section 3.1 (Ba 2016); 'rms_norm' (Zhang 2019)
    norm: str = "layer_norm"
    # 'post': norm(x + sublayer(x)), section 3.1; 'pre': x + sublayer(norm(x)) (Xiong 2020)
    norm_placement: str = "post"
    # added to the variance before the square root (Ba 2016)
    norm_epsilon: float = 1e-6
    # of the feed-forward network; section 3.3; gated: 'reglu', 'geglu', 'swiglu' (Shazeer 2020)
    activation: str = "relu"
    # biases in attention, feed-forward and norm; section 3.3; False: Chowdhery 2022, section 2
    use_bias: bool = True
    # a learned bias for each token id is added to its logit; section 3.4 has none
    output_bias: bool = False
    # source, target and output share one embedding matrix; section 3.4; False: one matrix each
    tie_embeddings: bool = True
    # 'encoder_classifier': the 'mean' of a text's vectors or the 'first' (Devlin 2019, section 3)
    pooling: str = "mean"
    # 'encoder_classifier': number of classes; None: the dataset's (Devlin 2019, section 3)
    num_classes: int | None = None
    # dropout rate of embeddings and of each sublayer's output; section 5.4
    dropout: float = 0.1
    # dropout rate of attention weights (Devlin 2019, appendix A.2); section 5.4 has none
    attention_dropout: float = 0.0
    # recompute in the backward pass: 'full': all, 'dots': all but matrix products (Chen 2016)
    remat: str = "none"
    # type of activations; parameters, softmax and loss stay float32 (Kalamkar 2019)
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Datasets, tokenizer and batches."""

    # TFDS dataset, name/config; or 'parallel_text', 'plain_text', 'labelled_text': custom files
    dataset: str = "cldr_translate/en-de"
    # custom text: 2 files with a sentence per line, or 1 of TSV, CSV or JSONL; globs allowed
    train_files: tuple[str, ...] = ()
    # files of the validation split, as train_files
    validation_files: tuple[str, ...] = ()
    # files of the test split, as train_files
    test_files: tuple[str, ...] = ()
    # custom text, malformed lines: 'refuse' the dataset, or 'drop' their examples
    faults: str = "refuse"
    # custom text: a line of more bytes is malformed
    longest_line: int = 100_000
    # .tsv, .csv: line 1 names the columns; None: of .csv, and a warning if a file looks otherwise
    header: bool | None = None
    # .tsv, .csv: fields may be in quotes; False: never, a .csv is plain lines; None: as `header`
    quoted: bool | None = None
    # translation: language to translate from; None: the first in the dataset's name
    source_language: str | None = None
    # translation: the 2 languages, or their feature names; (): as the dataset defines them
    languages: tuple[str, ...] = ()
    # classifier, language model: features joined to one text, 'a,b'; None: all text features
    text_features: str | None = None
    # TFDS split, slices allowed: 'train[:10%]'
    train_split: str = "train"
    # dataset to validate on, with the same languages or labels; None: `dataset`
    validation_dataset: str | None = None
    # dataset to test on; None: `dataset`
    test_dataset: str | None = None
    # split for each evaluation during training, which selects the best checkpoint
    validation_split: str = "validation"
    # split for the evaluation at the end of training
    test_split: str = "test"
    # 'unigram' or 'bpe' (section 5.1), trained by SentencePiece; 'marian': an imported one
    tokenizer: str = "unigram"
    # pieces in the shared vocabulary, special tokens and bytes included; section 5.1
    vocab_size: int = 37000
    # if the text has fewer pieces than vocab_size: 'hard': refuse it, 'soft': use all of them
    vocab_limit: str = "hard"
    # texts for training the tokenizer, evenly spaced over the split; all if there are fewer
    vocabulary_sample: int = 100_000
    # new random segmentation each epoch: dropout rate of 'bpe', alpha of 'unigram'; 0: fixed
    subword_sampling: float = 0.0
    # target positions of a batch, padding included; section 5.1
    tokens_per_batch: int = 25000
    # lengths that rows are padded to, in tokens; one compilation each
    buckets: tuple[int, ...] = (32, 64, 128, 256)
    # number of lengths, chosen to minimise the padding of the training texts; None: `buckets`
    num_buckets: int | None = None
    # a row of the longest bucket holds several examples, which do not attend to each other
    packing: bool = False
    # a batch's rows are a multiple of this, so that devices can share them
    rows_multiple: int = 8
    # seed of the order of examples
    seed: int = 0
    # the texts are already tokenised: the metric is 'bleu_tokenized' instead of 'bleu'
    pretokenized: bool = False
    # share of characters with their own pieces, others are bytes; None: 1, or 0.9995 if many
    character_coverage: float | None = None
    # of sources: 'whitespace': runs become one space, invisible characters are removed; 'nfc' and
    # 'nfkc': the same after that Unicode form; None: 'whitespace' for custom text, else 'none'
    normalization: str | None = None
    # sacreBLEU's tokenizer; None: by the target language, 'zh' for Chinese, '13a' for most
    bleu_tokenizer: str | None = None


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Adam and its learning rate; section 5.3."""

    # 'paper': equation 3; 'inverse_sqrt': the same, given its peak; 'linear': up, then down to 0
    schedule: str = "paper"
    # 'paper': factor of equation 3; other schedules: the peak
    learning_rate: float = 1.0
    # steps of linear warmup
    warmup_steps: int = 4000
    # decay of the moving average of gradients
    b1: float = 0.9
    # decay of the moving average of squared gradients
    b2: float = 0.98
    # added to the denominator of Adam's update
    eps: float = 1e-9
    # gradients are clipped to this global norm; None: no clipping
    clip_norm: float | None = None
    # microbatches per batch; the update is that of the whole batch
    accumulate_steps: int = 1


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of the training, its loss, evaluations and checkpoints."""

    # parameter updates
    num_steps: int = 100_000
    # probability mass moved from the true token to all tokens; section 5.4
    label_smoothing: float = 0.1
    # R-Drop: weight of the divergence between 2 passes with dropout (Liang 2021); 0: 1 pass
    r_drop: float = 0.0
    # seed of initialisation and dropout
    seed: int = 0
    # steps between lines of metrics.jsonl
    log_every: int = 100
    # steps between evaluations on the validation split
    eval_every: int = 5000
    # steps between checkpoints; each evaluation also writes one
    checkpoint_every: int = 1000
    # newest checkpoints kept
    keep_newest: int = 2
    # best checkpoints kept
    keep_best: int = 1
    # validation metric that selects the best checkpoint
    best_metric: str = "loss"
    # 'last:5', 'best:5': the final model is the average of these checkpoints; section 6.1
    average: str | None = None
    # decay of a moving average of the parameters, used for evaluation; None: no average
    ema_decay: float | None = None
    # stop after n evaluations without a new best (ties count as new); None: never
    patience: int | None = None
    # trace some steps for TensorBoard or XProf, and list the most expensive operations
    profile: bool = False
    # validation examples to translate at each evaluation; 0: none
    decode_examples: int = 200

    @property
    def passes(self) -> int:
        """Forward passes of each example in a step."""
        return 2 if self.r_drop else 1


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How text is generated."""

    # 'greedy': the most probable token; 'sample': with temperature, top_k and top_p; 'beam':
    # section 6.1; 'mask_predict': all tokens at once (Ghazvininejad 2019, section 3)
    method: str = "greedy"
    # 'beam': hypotheses kept; section 6.1
    beam_size: int = 4
    # 'beam': exponent of the length penalty, which divides the score; section 6.1
    alpha: float = 0.6
    # 'beam': penalised length, 'wu': (5 + length) / 6 (Wu 2016, equation 14); 'power': length
    penalty: str = "wu"
    # 'mask_predict': passes; each predicts the least probable tokens again
    iterations: int = 10
    # 'mask_predict': most probable lengths tried; the best result is kept
    length_candidates: int = 5
    # 'sample': divides the logits; below 1 favours probable tokens
    temperature: float = 1.0
    # 'sample': only the k most probable tokens (Fan 2018, section 5.4); None: all
    top_k: int | None = None
    # 'sample': only the most probable tokens of this total probability (Holtzman 2020); None: all
    top_p: float | None = None
    # 'sample': seed
    seed: int = 0
    # most tokens beyond the length of the source or prompt; section 6.1
    max_extra_length: int = 50
    # tokens before the end symbol is allowed, prompt or prefix included
    min_length: int = 0
    # no n-gram of this length occurs twice in a text (Paulus 2018); None: no limit
    no_repeat_ngram: int | None = None
    # input positions decoded at once, padding and each beam counted; raise it on a GPU
    tokens_per_batch: int = 4096


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """How devices share the work; -1, for at most one axis, is all devices left by the others."""

    # 'mesh': jit over a device mesh; 'pmap': one replica per device. Both have equal results
    mode: str = "mesh"
    # replicas of the model, each with its own rows of a batch
    data: int = -1
    # 'mesh': devices that split the rows and the state (Rajbhandari 2020, section 5.3)
    fsdp: int = 1
    # 'mesh': devices that split each layer and the vocabulary (Shoeybi 2019, section 3)
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)


# Ids of the special tokens, the same in every vocabulary: padding, start, end, unknown.
PAD, BOS, EOS, UNK = 0, 1, 2, 3

# of sacreBLEU
BLEU_TOKENIZERS = ("13a", "zh", "char", "intl", "ja-mecab", "ko-mecab", "flores200", "spm")

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
    "data.tokenizer": ("unigram", "bpe", "marian"),
    "data.vocab_limit": ("hard", "soft"),
    "data.faults": ("refuse", "drop"),
    "optim.schedule": ("paper", "inverse_sqrt", "linear"),
    "data.normalization": ("none", "whitespace", "nfc", "nfkc"),
    "data.bleu_tokenizer": BLEU_TOKENIZERS,
    "train.best_metric": ("loss", "accuracy", "exact_match", "bleu", "chrf", "bleu_tokenized"),
    "decode.method": ("greedy", "sample", "beam", "mask_predict"),
    "decode.penalty": ("wu", "power"),
    "parallel.mode": ("mesh", "pmap"),
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
    data.num_buckets optim.warmup_steps optim.accumulate_steps train.num_steps train.log_every
    train.eval_every train.checkpoint_every train.keep_newest train.patience decode.top_k
    decode.beam_size decode.no_repeat_ngram decode.iterations decode.length_candidates
    decode.tokens_per_batch
""".split()
AT_LEAST_ZERO = """
    train.keep_best train.decode_examples decode.max_extra_length decode.min_length
    data.seed train.seed decode.seed
""".split()
LOWEST = {
    **dict.fromkeys(AT_LEAST_ONE, 1),
    **dict.fromkeys(AT_LEAST_ZERO, 0),
    "model.num_classes": 2,
    "model.vocab_size": 8,
    "data.vocab_size": 8,
    "data.character_coverage": 0.98,  # SentencePiece's bound
    "decode.alpha": 0.0,
    "train.r_drop": 0.0,
}
HIGHEST = {  # inclusive
    **dict.fromkeys(("data.seed", "train.seed", "decode.seed"), 2**32 - 1),
    "decode.alpha": 10.0,  # the length penalty of 7,000 tokens still fits in a float32
    "train.r_drop": 100.0,
    "data.character_coverage": 1.0,
    **dict.fromkeys(("decode.max_extra_length", "decode.min_length"), 2**20),
    **dict.fromkeys(("decode.beam_size", "decode.iterations", "decode.length_candidates"), 1000),
}
POSITIVE = """
    model.norm_epsilon model.rope_base optim.learning_rate optim.eps optim.clip_norm
    decode.temperature decode.top_p
""".split()
BELOW_ONE = """
    model.dropout model.attention_dropout train.label_smoothing train.ema_decay optim.b1 optim.b2
    data.subword_sampling
""".split()

# Fields that have an effect only if another field has this value.
READ_IF = {
    **dict.fromkeys(
        ("model.relative_clip", "model.relative_values"), ("model.position", "relative")
    ),
    "model.rope_base": ("model.position", "rotary"),
    "model.pooling": ("model.architecture", "encoder_classifier"),
    "data.num_buckets": ("data.packing", False),
    "train.r_drop": ("model.decoder", "causal"),
    "data.pretokenized": ("model.architecture", "encoder_decoder"),
    "data.bleu_tokenizer": ("model.architecture", "encoder_decoder"),
    **dict.fromkeys(
        ("decode.temperature", "decode.top_k", "decode.top_p", "decode.seed"),
        ("decode.method", "sample"),
    ),
    **dict.fromkeys(
        ("decode.beam_size", "decode.alpha", "decode.penalty"), ("decode.method", "beam")
    ),
    **dict.fromkeys(
        ("decode.iterations", "decode.length_candidates"), ("decode.method", "mask_predict")
    ),
}

# Fields of `train` that a resumed run may change. They do not affect earlier steps. Later steps
# stay the same too, except under another model.backend or model.remat (rounding), and under the
# 'linear' schedule, which ends at the new train.num_steps.
RESUMED = """
    num_steps log_every eval_every checkpoint_every keep_newest keep_best average patience
    decode_examples profile
""".split()
# Fields that imported weights fix before the first step; all others may still change.
NOT_IN_WEIGHTS = ("dropout", "attention_dropout", "dtype", "remat", "backend")
FIXED_BY_WEIGHTS = (
    "data.tokenizer",
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
    "model.backend",
    "model.remat",
    *(f"train.{name}" for name in RESUMED),
)
