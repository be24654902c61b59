"""Python code that tokenises as a run does, without this package, for the cards of exports."""

import dataclasses

from flaxformer_lite.checks.vocabularies import SIDES
from flaxformer_lite.data.tokens.any_tokenizer import AnyTokenizer
from flaxformer_lite.data.tokens.two_vocabularies import (
    TwoVocabularies,
    models_of,
    tokenizer_of,
)


@dataclasses.dataclass(frozen=True)
class Code:
    """Parts of a program: from `text` to pieces, and from pieces to a text."""

    packages: str  # for `pip install`
    imports: str  # of the modules that the parts need; may be empty
    setup: tuple[str, ...]  # lines
    pieces: str  # an expression of the pieces of `text`, an iterable
    text: str  # an expression of a text; {} is the list of its pieces


def _huggingface(name: str, file: str) -> Code:
    """Returns the code for a tokenizer.json; `name`: of the variable."""
    return Code(
        "tokenizers",
        "tokenizers",
        (
            f'{name} = tokenizers.Tokenizer.from_file("{file}")',
            f"{name}.no_truncation(), {name}.no_padding()",
            f"{name}.encode_special_tokens = True",
        ),
        f"{name}.encode(text, add_special_tokens=False).tokens",
        f"{name}.decode([{name}.token_to_id(piece) for piece in {{}}], skip_special_tokens=False)",
    )


def _sentencepiece(name: str, file: str) -> Code:
    """Returns the code for a SentencePiece model; `name`: of the variable."""
    return Code(
        "sentencepiece",
        "sentencepiece",
        (f'{name} = sentencepiece.SentencePieceProcessor("{file}")',),
        f"{name}.encode(text, out_type=str)",
        f"{name}.decode({{}})",
    )


SYMBOLS = {
    "char": Code("", "", (), "text", '"".join({})'),
    "word": Code(
        "", "re", (), r're.findall(r"\n|[^ \n]+", text)', r're.sub(" ?\n ?", "\n", " ".join({}))'
    ),
    "spaces": Code("", "", (), '(text.split(" ") if text else [])', '" ".join({})'),
    "byte": Code(
        "",
        "",
        (),
        '(f"<0x{byte:02X}>" for byte in text.encode(errors="replace"))',
        'bytes(int(piece[3:5], 16) for piece in {}).decode(errors="replace")',
    ),
    "huggingface": _huggingface("tokenizer", "tokenizer.json"),
}


def of(tokenizer: AnyTokenizer) -> Code:
    """Returns the code for a tokenizer, whose `models` are files in the current folder."""
    if isinstance(tokenizer, TwoVocabularies):
        return _of_both(tokenizer)
    if tokenizer.kind in SYMBOLS:
        return SYMBOLS[tokenizer.kind]
    models = list(tokenizer.models)
    opened = ", ".join(
        f'sentencepiece.SentencePieceProcessor("{name}")' for name in (models[0], models[-1])
    )
    # With two models over a shared vocabulary, one model does not join the other's pieces.
    joined = '.replace("\\u2581", " ").strip()' if len(models) > 1 else ""
    return Code(
        "sentencepiece",
        "sentencepiece",
        (f"source, target = {opened}",),
        "source.encode(text, out_type=str)",
        f"target.decode({{}}){joined}",
    )


def _of_both(tokenizer: TwoVocabularies) -> Code:
    """Returns the code for two tokenizers: pieces of the source, text of the target."""
    codes = []
    for side in SIDES:
        own, (file, *_) = tokenizer_of(tokenizer, side), models_of(tokenizer, side)
        if own.kind == "huggingface":
            codes.append(_huggingface(side, file))
        elif own.kind in SYMBOLS:
            codes.append(SYMBOLS[own.kind])
        else:
            codes.append(_sentencepiece(side, file))
    source, target = codes
    return Code(
        " ".join(dict.fromkeys(each.packages for each in codes if each.packages)),
        ", ".join(dict.fromkeys(each.imports for each in codes if each.imports)),
        (*source.setup, *target.setup),
        source.pieces,
        target.text,
    )
