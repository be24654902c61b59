"""Every setting and its default, as frozen dataclasses; `field_rules.py` has the valid values.

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
    # token ids of the target, if `vocab_size` is only the source's; None: shared, as in section 5.1
    target_vocab_size: int | None = None
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
    # source, target and output share one embedding matrix; section 3.4; with `target_vocab_size`
    # only target and output can; False: one matrix each
    tie_embeddings: bool = True
    # 'encoder_classifier': the 'mean' of a text's vectors or the 'first' (Devlin 2019, section 3)
    pooling: str = "mean"
    # 'encoder_classifier': number of classes; None: the dataset's (Devlin 2019, section 3)
    num_classes: int | None = None
    # dropout rate of embeddings and of each sublayer's output; section 5.4
    dropout: float = 0.1
    # dropout rate of attention weights (Devlin 2019, appendix A.2); section 5.4 has none
    attention_dropout: float = 0.0
    # dropout rate of the feed-forward network's inner units, after any gate; section 5.4 has none
    feed_forward_dropout: float = 0.0
    # dropout rate of the sums of embeddings and positions; None: `dropout`; section 5.4
    embedding_dropout: float | None = None
    # probability that a row skips a layer in training (Huang 2016, section 3), the same for all
    # layers, without scaling (Fan 2020, section 3.2); 0: never
    layer_drop: float = 0.0
    # the layers of a stack share their parameters (Dehghani 2019, section 2; Lan 2020, section 3.1)
    tie_layers: bool = False
    # recompute in the backward pass: 'full': all, 'dots': all but matrix products (Chen 2016)
    remat: str = "none"
    # type of activations; parameters, softmax and loss stay float32 (Kalamkar 2019)
    dtype: str = "float32"

    @property
    def output_vocab_size(self) -> int | None:
        """Number of token ids that the output predicts; None: not known yet."""
        return self.vocab_size if self.target_vocab_size is None else self.target_vocab_size

    @property
    def ties_source(self) -> bool:
        """Whether the source has the embedding matrix of the target."""
        return self.tie_embeddings and self.target_vocab_size is None


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
    # for train.guided_alignment: word alignments of train_files, '0-0 1-2' a line; globs allowed
    train_alignments: tuple[str, ...] = ()
    # custom text, malformed lines: 'refuse' the dataset, or 'drop' their examples
    faults: str = "refuse"
    # custom text: a line of more bytes is malformed
    longest_line: int = 100_000
    # plain_text: a file is one text, with its line ends; slices of a split count characters
    whole_files: bool = False
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
    # 'unigram' or 'bpe' (section 5.1), trained by SentencePiece; 'char', 'word', 'spaces': symbols
    # of the training texts (data/tokens/symbol_tokenizer.py); 'byte': UTF-8; 'sentencepiece',
    # 'huggingface': a given file; 'marian': an imported one
    tokenizer: str = "unigram"
    # tokenizer.model, or a workdir, to copy the tokenizer from; 'sentencepiece', 'huggingface':
    # the file; None: of init.run, or trained
    tokenizer_file: str | None = None
    # pieces in the shared vocabulary, special tokens and bytes included; section 5.1; 'char',
    # 'word', 'spaces': the most symbols; None: the size follows from the texts or the file
    vocab_size: int | None = 37000
    # kind of the targets' tokenizer, as `tokenizer` of the sources'; None: shared, section 5.1
    target_tokenizer: str | None = None
    # as tokenizer_file, for the targets; of a workdir with two vocabularies, that of its targets
    target_tokenizer_file: str | None = None
    # as vocab_size, for the targets
    target_vocab_size: int | None = None
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
    # language model: tokens of a row, consecutive ones of all texts joined; None: a text a row
    windows: int | None = None
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

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """The lengths that rows may be padded to, in tokens."""
        return self.buckets if self.windows is None else (self.windows,)

    @property
    def has_symbols(self) -> bool:
        """Whether targets are symbols with spaces between them, whose error rates are computed."""
        return (self.target_tokenizer or self.tokenizer) in ("spaces", "word")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimizer, its learning rate, and which parameters it trains; section 5.3."""

    # 'adam' (Kingma 2015), section 5.3; 'adamw' (Loshchilov 2019), 'lion' (Chen 2023), 'adafactor'
    # (Shazeer 2018), 'muon' (Jordan 2024), 'sgd' and 'schedule_free' (Defazio 2024)
    optimizer: str = "adam"
    # 'paper': equation 3; 'inverse_sqrt': the same, given its peak; 'linear': up, then down to 0;
    # 'cosine' (Loshchilov 2017); 'wsd': up, stable, down (Hu 2024); 'constant': up, then stable
    schedule: str = "paper"
    # 'paper': factor of equation 3; other schedules: the peak
    learning_rate: float = 1.0
    # steps of linear warmup
    warmup_steps: int = 4000
    # 'wsd': steps of the decay at the end; None: 10 % of num_steps (Hu 2024, section 4.2)
    decay_steps: int | None = None
    # 'cosine', 'wsd': rate of the last step as a share of the peak (Brown 2020, appendix B)
    final_rate: float = 0.1
    # decay of the moving average of gradients; 'schedule_free': share of the average in the point
    # where gradients are computed
    b1: float = 0.9
    # decay of the moving average of squared gradients; 'lion': of gradients
    b2: float = 0.98
    # added to the denominator of Adam's update
    eps: float = 1e-9
    # decay of the sum of gradients; None: 0.9 for 'sgd', 0.95 for 'muon' (Jordan 2024)
    momentum: float | None = None
    # share of each kernel that is subtracted in a step, times the learning rate (Loshchilov 2019)
    weight_decay: float = 0.0
    # gradients are clipped to this global norm; None: no clipping
    clip_norm: float | None = None
    # skip an update if the gradient norm, before clipping, is more than this many standard
    # deviations above the mean of recent steps (training/spikes.py); None: never
    skip_spikes: float | None = None
    # steps in a row that may be skipped because loss or gradient norm is not finite
    # (training/spikes.py); one more ends the run; 0: the first ends it
    nan_tolerance: int = 0
    # microbatches per batch; the update is that of the whole batch
    accumulate_steps: int = 1
    # parameters that keep their initial values: regular expressions, 'encoder/.*'
    freeze: tuple[str, ...] = ()
    # parameters with another rate (a factor) or weight decay: 'encoder/.*: rate=0.1 decay=False'
    groups: tuple[str, ...] = ()

    def last_phase(self, num_steps: int) -> int:
        """Returns the steps of the decay of 'wsd', at least 1."""
        return max(1, num_steps // 10) if self.decay_steps is None else self.decay_steps


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of the training, its loss, evaluations and checkpoints."""

    # parameter updates
    num_steps: int = 100_000
    # probability mass moved from the true token to all tokens; section 5.4
    label_smoothing: float = 0.1
    # R-Drop: weight of the divergence between 2 passes with dropout (Liang 2021); 0: 1 pass
    r_drop: float = 0.0
    # weight of a label's log(Z)^2, Z: softmax denominator (Chowdhery 2022, section 5; 1e-4); 0: no
    z_loss: float = 0.0
    # weight of the loss that guides a cross-attention head (Garg 2019, section 4.2: 0.05); 0: none
    guided_alignment: float = 0.0
    # this head's layer of the decoder, from 0; None: the one before the last (Garg 2019, 4.1)
    alignment_layer: int | None = None
    # its number in the layer, from 0
    alignment_head: int = 0
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
    # program and arguments that compute another metric of translations: it prints a number last;
    # {hypotheses}, {references} and {sources} are files of a text a line; None: no such metric
    metric_command: str | None = None
    # name of its number in the log: 'external_score': higher is better; 'external_error': lower
    metric_name: str = "external_score"
    # seconds after which the program is killed
    metric_seconds: float = 600.0

    @property
    def passes(self) -> int:
        """Forward passes of each example in a step."""
        return 2 if self.r_drop else 1


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How text is generated."""

    # 'greedy': the most probable token; 'sample': with temperature, top_k and top_p; 'beam':
    # section 6.1; 'diverse_beam' (Vijayakumar 2018); 'stochastic_beam' (Kool 2019);
    # 'mask_predict': all tokens at once (Ghazvininejad 2019, section 3)
    method: str = "greedy"
    # 'beam', 'diverse_beam', 'stochastic_beam': hypotheses kept; section 6.1
    beam_size: int = 4
    # 'beam', 'diverse_beam': exponent of the length penalty, which divides the score; section 6.1
    alpha: float = 0.6
    # with `alpha`: penalised length, 'wu': (5 + length) / 6 (Wu 2016, equation 14); 'power': length
    penalty: str = "wu"
    # 'diverse_beam': groups, with equal shares of the hypotheses (Vijayakumar 2018)
    beam_groups: int = 4
    # 'diverse_beam': penalty of a token for each use by earlier groups (Vijayakumar 2018)
    diversity: float = 0.5
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
    # 'sample': of those only tokens of this probability or more (Hewitt 2022); 0: all
    epsilon: float = 0.0
    # 'sample', 'stochastic_beam': seed
    seed: int = 0
    # most tokens beyond the length of the source or prompt; section 6.1
    max_extra_length: int = 50
    # tokens before the end symbol is allowed, prompt or prefix included
    min_length: int = 0
    # no n-gram of this length occurs twice in a text (Paulus 2018); None: no limit
    no_repeat_ngram: int | None = None
    # words and phrases that no output contains, by their tokens (data/tokens/forbidden.py)
    forbidden: tuple[str, ...] = ()
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
class InitConfig:
    """The parameters at step 0: random ones, or those of another run."""

    # workdir of a run, or a folder of `export safetensors`, to start from; None: random parameters
    run: str | None = None
    # 'last:5' or 'best:5' of its checkpoints, or 'none': its best; None: its train.average
    average: str | None = None
    # 'raw', or 'ema', its moving average; None: 'ema' if it keeps one
    parameters: str | None = None
    # rules 'NEW=OLD': a regular expression for the start of new names, and the old start
    map: tuple[str, ...] = ()
    # parameters that init.run lacks: 'refuse', or 'random': initialised as in any other run
    missing: str = "refuse"
    # 'same': the tokenizer of init.run; 'extend': the same with new pieces, to data.vocab_size
    vocabulary: str = "same"
    # 'extend': of a new piece, the 'mean' of the old pieces that spell it, or 'random'
    new_embeddings: str = "mean"
    # 'extend', model.output_bias: added to the logit of each new piece at step 0
    new_bias: float = 0.0


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    init: InitConfig = dataclasses.field(default_factory=InitConfig)


# Ids of the special tokens, the same in every vocabulary: padding, start, end, unknown.
PAD, BOS, EOS, UNK = 0, 1, 2, 3
