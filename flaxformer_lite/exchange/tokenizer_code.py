"""Python code that tokenises as a run does, without this package, for the cards of exports."""

import dataclasses

from flaxformer_lite.data.tokens.any_tokenizer import AnyTokenizer


@dataclasses.dataclass(frozen=True)
class Code:
    """Parts of a program: from `text` to pieces, and from pieces to a text."""

    packages: str  # for `pip install`
    imports: str  # of the modules that the parts need; may be empty
    setup: tuple[str, ...]  # lines
    pieces: str  # an expression of the pieces of `text`, an iterable
    text: str  # an expression of a text; {} is the list of its pieces
    keeps_start: bool = False  # whether `text` removes a start symbol itself


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
    "huggingface": Code(
        "tokenizers",
        "tokenizers",
        (
            'tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")',
            "tokenizer.no_truncation(), tokenizer.no_padding()",
            "tokenizer.encode_special_tokens = True",
        ),
        "tokenizer.encode(text, add_special_tokens=False).tokens",
        "tokenizer.decode([tokenizer.token_to_id(piece) for piece in {}], "
        "skip_special_tokens=False)",
    ),
}


def of(tokenizer: AnyTokenizer) -> Code:
    """Returns the code for a tokenizer, whose `models` are files in the current folder."""
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
        keeps_start=tokenizer.kind != "sentencepiece",
    )
