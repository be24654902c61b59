"""Files of tokenizers as other programs make them: SentencePiece models, tokenizer.json."""

import io
import random

import sentencepiece

WORDS = "anna otto regal lager nebel leben eis tor rot gras sarg Haus Baum Katze".split()


def texts(number: int = 211, seed: int = 0) -> list[str]:
    """Returns texts of 5 words each."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=5)) for _ in range(number)]


def sentencepiece_model(**options) -> bytes:
    """Returns a model with SentencePiece's own defaults, but for `options`."""
    model = io.BytesIO()
    given = {"vocab_size": 53, "hard_vocab_limit": False, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts()), model_writer=model, **given
    )
    return model.getvalue()


def tokenizer_json(kind: str) -> bytes:
    """Returns a tokenizer.json, 'bpe' as of GPT-2, 'wordpiece' as of BERT, 'unigram' as of T5."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    if kind == "bpe":
        found = tokenizers.Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<|endoftext|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=283, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "wordpiece":
        found = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        found.normalizer = normalizers.BertNormalizer()
        found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        found.decoder = decoders.WordPiece()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(
            vocab_size=61, special_tokens=special, show_progress=False
        )
    else:
        found = tokenizers.Tokenizer(models.Unigram())
        found.pre_tokenizer = pre_tokenizers.Metaspace()
        found.decoder = decoders.Metaspace()
        special = ["<pad>", "</s>", "<unk>"]
        trainer = trainers.UnigramTrainer(
            vocab_size=61, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    found.train_from_iterator(texts(), trainer)
    if kind == "wordpiece":
        found.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        found.enable_truncation(3)
        found.enable_padding()
    return found.to_str().encode()
