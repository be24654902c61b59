"""Every setting and its default, in frozen dataclasses, and what values a field may have.

The defaults are the base model of "Attention Is All You Need" (sections 3, 5 and 6.1).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of the Transformer. "Section" and "Table" without a name are those of "Attention Is All You Need"."""

    architecture: str = (
        "encoder_decoder"  # section 3.1; 'encoder_classifier' (Devlin 2019), 'decoder_lm' (Radford 2018)
    )
    decoder: str = "causal"  # section 3.2.3; 'masked': sees all, predicts masked tokens (Ghazvininejad 2019, section 2)
    vocab_size: int | None = None  # ids 0..vocab_size-1; None: as many as the tokenizer has; section 5.1
    d_model: int = 512  # width of embeddings and of every layer's input and output; section 3.1
    num_heads: int = 8  # attention heads; section 3.2.2
    num_kv_heads: int | None = None  # heads of keys and values that queries share (Ainslie 2023); None: num_heads
    d_head: int | None = None  # size of one head's queries, keys and values; None: d_model / num_heads; section 3.2.2
    d_ff: int = 2048  # inner width of the feed-forward network; section 3.3
    num_encoder_layers: int = 6  # section 3.1
    num_decoder_layers: int = 6  # section 3.1
    max_length: int = 256  # longest source or target, in tokens with end of sentence; section 3.5
    position: str = "sinusoidal"  # section 3.5; the schemes, and the source of each, are in model/positions.py
    rope_base: float = 10000.0  # 'rotary': the longest wavelength is 2 pi times this (Su 2021, section 3.2.2)
    relative_clip: int = 16  # 'relative': distances beyond this share one vector (Shaw 2018, section 3.2)
    relative_values: bool = False  # 'relative': vectors are added to values too (Shaw 2018, equation 3)
    attention: str = "dot_product"  # section 3.2.1; 'additive' (Bahdanau 2015, appendix A.1.2), which it discusses
    attention_window: int | None = None  # farthest token that self-attention sees; None: all; section 4
    backend: str = "auto"  # what computes attention, to the same result; section 3.2.1 and model/backends.py
    norm: str = "layer_norm"  # section 3.1 (Ba 2016); 'rms_norm' (Zhang 2019)
    norm_placement: str = "post"  # section 3.1: LayerNorm(x + sublayer(x)); 'pre' (Xiong 2020): x + sublayer(norm(x))
    norm_epsilon: float = 1e-6  # added to the variance before the square root (Ba 2016)
    activation: str = "relu"  # section 3.3; 'gelu', 'silu' and gated 'reglu', 'geglu', 'swiglu' (Shazeer 2020)
    use_bias: bool = True  # in attention, feed-forward and LayerNorm; section 3.3. False: Chowdhery 2022, section 2
    output_bias: bool = False  # one number a token, added to the logits; section 3.4 has none
    tie_embeddings: bool = True  # source, target and output share one matrix, section 3.4; False: a matrix each
    pooling: str = "mean"  # 'encoder_classifier': 'mean' of a text's vectors, or its 'first' (Devlin 2019, section 3)
    num_classes: int | None = None  # 'encoder_classifier': None: as many as the dataset has (Devlin 2019, section 3)
    dropout: float = 0.1  # on embeddings and on each sublayer's output; section 5.4
    attention_dropout: float = 0.0  # on attention weights (Devlin 2019, appendix A.2); section 5.4 names none
    remat: str = "none"  # what a layer computes again in the backward pass, not kept (Chen 2016); model/layers.py
    dtype: str = "float32"  # of activations, or 'bfloat16' (Kalamkar 2019); parameters, softmax, loss stay float32


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to learn from, and how it is cut into batches."""

    dataset: str = "cldr_translate/en-de"  # a TFDS dataset that suits model.architecture: name/config; or OWN_TEXT
    train_files: tuple[str, ...] = ()  # own text: a pair of files with a line each, or one, TSV or JSONL; may be globs
    validation_files: tuple[str, ...] = ()  # the same
    test_files: tuple[str, ...] = ()  # the same
    faults: str = "refuse"  # own text: what becomes of lines that cannot be right; 'drop': their examples are left out
    longest_line: int = 100_000  # own text: bytes of a line, over which it is such a fault
    source_language: str | None = None  # translation: the side to translate from; None: the first in the dataset's name
    languages: tuple[str, ...] = ()  # translation: its two sides, or the keys they have; (): as the dataset says
    text_features: str | None = None  # classifier, language model: 'a,b' joined to one text; None: all texts it has
    train_split: str = "train"  # TFDS split, slices allowed: 'train[:10%]'
    validation_dataset: str | None = None  # what to validate on, the same languages or labels; None: `dataset`
    test_dataset: str | None = None  # what to test on; None: `dataset`
    validation_split: str = "validation"  # measured at each evaluation; picks the best checkpoint
    test_split: str = "test"  # measured once, at the end
    tokenizer: str = "unigram"  # 'unigram' or 'bpe' (section 5.1), trained by SentencePiece; 'marian': an imported one
    vocab_size: int = 37000  # pieces in the shared vocabulary, special tokens and bytes included; section 5.1
    vocabulary_sample: int = 100_000  # texts, at even distances, that the tokenizer is trained on; fewer: all
    subword_sampling: float = 0.0  # training texts cut anew each epoch: 'bpe' dropout, 'unigram' alpha; 0: always alike
    tokens_per_batch: int = 25000  # target positions of a batch, padding included; section 5.1
    buckets: tuple[int, ...] = (32, 64, 128, 256)  # lengths batches are padded to; one compilation each
    num_buckets: int | None = None  # so many lengths, chosen from the texts to leave least padding; None: `buckets`
    packing: bool = False  # texts, or pairs, one after another in rows of the longest bucket, each on its own
    rows_multiple: int = 8  # a batch's rows are a multiple of this, so that devices can share them
    seed: int = 0  # of the order of examples
    pretokenized: bool = False  # the texts come tokenised: translations are scored by 'bleu_tokenized' in place of bleu


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Adam with warmup; section 5.3."""

    schedule: str = "paper"  # 'paper': equation 3; 'inverse_sqrt': the same, named by its peak; 'linear': up, then to 0
    learning_rate: float = 1.0  # 'paper': factor of equation 3; else the highest rate reached
    warmup_steps: int = 4000  # steps of linear increase
    b1: float = 0.9  # decay of the mean of gradients
    b2: float = 0.98  # decay of the mean of squared gradients
    eps: float = 1e-9  # added to the denominator of the update
    clip_norm: float | None = None  # largest global gradient norm; None: no clipping
    accumulate_steps: int = 1  # microbatches a batch is split into; the result is that of the whole batch


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long to train, and what to keep."""

    num_steps: int = 100_000  # updates of the parameters
    label_smoothing: float = 0.1  # probability taken from the true token and spread evenly; section 5.4
    r_drop: float = 0.0  # weight of how far two draws of dropout disagree (Liang 2021); 0: one draw, half the work
    seed: int = 0  # of initialisation and dropout
    log_every: int = 100  # steps between lines of metrics.jsonl
    eval_every: int = 5000  # steps between evaluations on the validation split
    checkpoint_every: int = 1000  # steps between checkpoints; there is one at each evaluation too
    keep_newest: int = 2  # newest checkpoints kept
    keep_best: int = 1  # best checkpoints kept
    best_metric: str = "loss"  # on validation: 'loss', 'accuracy', 'exact_match', 'bleu', 'chrf' or 'bleu_tokenized'
    average: str | None = None  # 'last:5', 'best:5': the result is the average of these checkpoints; section 6.1
    ema_decay: float | None = None  # keeps a moving average of the parameters, which is then what is evaluated and used
    patience: int | None = None  # evaluations after the best, or the last of equally good, to stop at; None: never
    profile: bool = False  # traces some steps, for the usual viewers, and shows which operations cost most
    decode_examples: int = 200  # validation examples translated at each evaluation; 0: no samples

    @property
    def passes(self) -> int:
        """How often each example passes through the model in a step."""
        return 2 if self.r_drop else 1


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How texts are written."""

    method: str = "greedy"  # 'greedy': the likeliest token; 'sample': drawn by temperature, top_k, top_p; 'beam': 6.1;
    # 'mask_predict': all tokens at once, the unlikeliest again and again (Ghazvininejad 2019, section 3)
    beam_size: int = 4  # 'beam': hypotheses that are kept; section 6.1
    alpha: float = 0.6  # 'beam': the power of the length that scores are divided by; section 6.1
    penalty: str = "wu"  # 'beam': that length, (5 + length) / 6 (Wu 2016, equation 14); 'power': the length itself
    iterations: int = 10  # 'mask_predict': how often tokens are predicted
    length_candidates: int = 5  # 'mask_predict': likeliest lengths that are tried, of which the best text is taken
    temperature: float = 1.0  # 'sample': logits are divided by this; below 1 likely tokens become likelier
    top_k: int | None = None  # 'sample': only the k likeliest tokens (Fan 2018, section 5.4); None: all
    top_p: float | None = None  # 'sample': only the likeliest that make up this share (Holtzman 2020); None: all
    seed: int = 0  # 'sample': of the draws
    max_extra_length: int = 50  # most tokens beyond those of the source, or of the prompt; section 6.1
    min_length: int = 0  # tokens before the end symbol may come, those of a prompt or prefix counted
    no_repeat_ngram: int | None = None  # no n-gram of this length occurs twice in a text (Paulus 2018); None: any may
    tokens_per_batch: int = (
        4096  # positions of inputs decoded at once, with padding and for each beam; a GPU takes more
    )


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """How devices share the work."""

    mode: str = "mesh"  # 'mesh': jit over a device mesh; 'pmap': one replica a device. Equal results
    data: int = -1  # copies of the model, each with its rows of a batch; -1: as many as the devices make
    fsdp: int = 1  # 'mesh': devices that split the rows and the state (Rajbhandari 2020, section 5.3); -1: the rest
    tensor: int = 1  # 'mesh': devices that split each layer and the vocabulary (Shoeybi 2019, section 3); -1: the rest


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)


# The ids of the special tokens, the same in every vocabulary: padding, start and end of a text, unknown.
PAD, BOS, EOS, UNK = 0, 1, 2, 3

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
    "data.faults": ("refuse", "drop"),
    "optim.schedule": ("paper", "inverse_sqrt", "linear"),
    "train.best_metric": ("loss", "accuracy", "exact_match", "bleu", "chrf", "bleu_tokenized"),
    "decode.method": ("greedy", "sample", "beam", "mask_predict"),
    "decode.penalty": ("wu", "power"),
    "parallel.mode": ("mesh", "pmap"),
}
OWN_TEXT = ("parallel_text", "plain_text", "labelled_text")  # values of data.dataset that read files
PRODUCT_POSITIONS = ("rotary", "relative")  # they act through query . key, which additive attention has not
# Inclusive lowest values; a field that is not here may be any number its type allows.
AT_LEAST_ONE = """
    model.d_model model.num_heads model.num_kv_heads model.d_head model.d_ff model.max_length model.num_encoder_layers
    model.num_decoder_layers model.relative_clip model.attention_window data.tokens_per_batch data.rows_multiple
    data.vocabulary_sample data.longest_line optim.warmup_steps optim.accumulate_steps train.num_steps train.log_every
    train.eval_every train.checkpoint_every train.keep_newest train.patience decode.top_k decode.beam_size
    data.num_buckets decode.no_repeat_ngram decode.iterations decode.length_candidates decode.tokens_per_batch
""".split()
AT_LEAST_ZERO = """
    train.keep_best train.decode_examples decode.max_extra_length decode.min_length data.seed train.seed decode.seed
""".split()
LOWEST = {**dict.fromkeys(AT_LEAST_ONE, 1), **dict.fromkeys(AT_LEAST_ZERO, 0), "model.num_classes": 2}
LOWEST |= {"model.vocab_size": 8, "data.vocab_size": 8, "decode.alpha": 0.0, "train.r_drop": 0.0}
HIGHEST = dict.fromkeys(("data.seed", "train.seed", "decode.seed"), 2**32 - 1) | {
    "decode.alpha": 10.0,  # the penalty of 7,000 tokens is a float32 then
    "train.r_drop": 100.0,
}
HIGHEST |= dict.fromkeys(("decode.max_extra_length", "decode.min_length"), 2**20) | {"decode.beam_size": 1000}
HIGHEST |= dict.fromkeys(("decode.iterations", "decode.length_candidates"), 1000)
POSITIVE = ("model.norm_epsilon", "model.rope_base", "optim.learning_rate", "optim.eps", "optim.clip_norm")
POSITIVE += ("decode.temperature", "decode.top_p")
BELOW_ONE = ("model.dropout", "model.attention_dropout", "train.label_smoothing", "train.ema_decay")
BELOW_ONE += ("optim.b1", "optim.b2", "data.subword_sampling")

# Fields that are read only where another field has this value: elsewhere they would be ignored.
READ_IF = {
    **dict.fromkeys(("model.relative_clip", "model.relative_values"), ("model.position", "relative")),
    "model.rope_base": ("model.position", "rotary"),
    "model.pooling": ("model.architecture", "encoder_classifier"),
    "data.num_buckets": ("data.packing", False),
    "train.r_drop": ("model.decoder", "causal"),
    "data.pretokenized": ("model.architecture", "encoder_decoder"),
    **dict.fromkeys(
        [f"decode.{field}" for field in ("temperature", "top_k", "top_p", "seed")], ("decode.method", "sample")
    ),
    **dict.fromkeys([f"decode.{field}" for field in ("beam_size", "alpha", "penalty")], ("decode.method", "beam")),
    **dict.fromkeys(("decode.iterations", "decode.length_candidates"), ("decode.method", "mask_predict")),
}

# What a resumed run may change. Steps that were computed stay as they are; those to come are the same too, but for
# rounding under another model.backend or model.remat, and for the 'linear' schedule, which ends at a new
# train.num_steps.
RESUMED = "num_steps log_every eval_every checkpoint_every keep_newest keep_best average patience".split()
RESUMED += ["decode_examples", "profile"]
# What weights that came from elsewhere have fixed before the first step; the rest is free until then.
NOT_IN_WEIGHTS = ("dropout", "attention_dropout", "dtype", "remat", "backend")
FIXED_BY_WEIGHTS = ("data.tokenizer", "data.vocab_size")
FIXED_BY_WEIGHTS += tuple(
    f"model.{each.name}" for each in dataclasses.fields(ModelConfig) if each.name not in NOT_IN_WEIGHTS
)
MAY_DIFFER_ON_RESUME = ("parallel.", "decode.", "model.backend", "model.remat", *(f"train.{name}" for name in RESUMED))
