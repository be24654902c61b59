"""A run as a folder that Hugging Face's Transformers load, as a `MarianMTModel`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_lite.config import DecodeConfig
from flaxformer_lite.data.tokens.tokenizer import MarianTokenizer, start_piece
from flaxformer_lite.exchange import marian
from flaxformer_lite.exchange.folder import about_decoding, on_host, power_of_length, write_arrays, write_json
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.trained import Trained

ACTIVATIONS = {ours: theirs for theirs, ours in reversed(marian.ACTIVATIONS.items())}


def write(run: Trained, folder: Path) -> tuple[str, str]:
    """What `MarianMTModel.from_pretrained` and `MarianTokenizer.from_pretrained` load.

    Returns:
      The name of the format, and how to use it.

    Raises:
      InputError: a `MarianMTModel` cannot hold the model; the field is named.
    """
    model, params = run.config.model, on_host(run)
    marian.check(model)
    vocabularies, special, ids = _their_vocabularies(run, params)
    rows = {side: len(vocabulary) for side, vocabulary in vocabularies.items()}
    arrays = marian.stored(marian.to_theirs(params, model, ids, rows))
    shared, tied = marian.SHARED in arrays, marian.OUTPUT not in arrays
    write_arrays(folder / "model.safetensors", arrays, {"format": "pt"})
    numbers = {role: vocabularies["target"][piece] for role, piece in special.items()}
    known = {
        "decoder_start_token_id": numbers["start"],
        "eos_token_id": numbers["eos"],
        "forced_eos_token_id": numbers["eos"],
        "pad_token_id": numbers["pad"],
    }
    write_json(folder / "config.json", known | _their_config(run, rows, shared=shared, tied=tied))
    never = sorted({numbers["pad"], numbers["start"], numbers["unk"]} - {numbers["eos"]})
    generation = known | {"bad_words_ids": [[number] for number in never]}
    generation |= generation_settings(run.config.decode, longest=model.max_length)
    write_json(folder / "generation_config.json", generation)
    separate = vocabularies["source"] != vocabularies["target"]
    write_json(folder / "vocab.json", vocabularies["source"])
    if separate:
        write_json(folder / "target_vocab.json", vocabularies["target"])
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate, "model_max_length": model.max_length}
    settings |= {f"{role}_token": special[role] for role in ("pad", "eos", "unk")}
    write_json(folder / "tokenizer_config.json", settings)
    models = list(run.tokenizer.models.values())
    (folder / "source.spm").write_bytes(models[0])
    (folder / "target.spm").write_bytes(models[-1])
    usage = (
        "With `pip install transformers torch sentencepiece`, where FOLDER is this folder:\n\n```python\n"
        "from transformers import MarianMTModel, MarianTokenizer\n"
        'model, tokenizer = MarianMTModel.from_pretrained("FOLDER"), MarianTokenizer.from_pretrained("FOLDER")\n'
        'found = model.generate(**tokenizer(["A text."], return_tensors="pt"))\n'
        "print(tokenizer.batch_decode(found, skip_special_tokens=True))\n```"
    )
    return "transformers", usage + about_decoding(run, "Transformers")


def generation_settings(decode: DecodeConfig, *, longest: int) -> dict[str, Any]:
    """What generation_config.json says of how `decode` writes; `longest`: tokens of any text, the start symbol too."""
    settings = {"max_length": longest, "min_length": decode.min_length + 1, "num_beams": 1, "do_sample": False}
    if decode.no_repeat_ngram is not None:
        settings["no_repeat_ngram_size"] = decode.no_repeat_ngram
    if decode.method == "beam":
        settings |= {"num_beams": decode.beam_size, "length_penalty": power_of_length(decode)}
    if decode.method == "sample":
        settings |= {"do_sample": True, "temperature": decode.temperature, "top_k": decode.top_k or 0}
        settings["top_p"] = 1.0 if decode.top_p is None else decode.top_p
    return settings


def _their_vocabularies(
    run: Trained, params: Mapping[str, Any]
) -> tuple[dict[str, dict[str, int]], dict[str, str], dict[str, list[int]]]:
    """Of each side its pieces with their numbers; the special pieces; and for each id of ours the number."""
    tokenizer = run.tokenizer
    if not isinstance(tokenizer, MarianTokenizer):
        pieces = tokenizer.vocabulary_of("source")
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        special = {"pad": pieces[PAD], "start": pieces[BOS], "eos": pieces[EOS], "unk": pieces[UNK]}
        sides = MarianTokenizer.SIDES
        return dict.fromkeys(sides, vocabulary), special, {side: list(range(len(pieces))) for side in sides}
    vocabularies, special, ids = dict(tokenizer.vocabulary), dict(tokenizer.special), dict(tokenizer.theirs)
    start = start_piece(vocabularies["target"], special)
    if start != special["start"] and not marian.start_is_shared(params, run.config.model, ids):
        special["start"] = start  # training has made it a token of its own
        alike = vocabularies["source"] == vocabularies["target"]
        for side in MarianTokenizer.SIDES if alike else ("target",):
            number = len(vocabularies[side])
            ids[side] = [*ids[side][:BOS], number, *ids[side][BOS + 1 :]]
            vocabularies[side] = vocabularies[side] | {start: number}
    return vocabularies, special, ids


def _their_config(run: Trained, rows: Mapping[str, int], *, shared: bool, tied: bool) -> dict[str, Any]:
    """config.json, without the numbers of special tokens."""
    model = run.config.model
    config = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "d_model": model.d_model,
        "vocab_size": rows["source"],
        "decoder_vocab_size": rows["target"],
        "encoder_layers": model.num_encoder_layers,
        "decoder_layers": model.num_decoder_layers,
        "max_position_embeddings": model.max_length,
        "activation_function": ACTIVATIONS[model.activation],
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": shared,
        "tie_word_embeddings": tied,
        "dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "activation_dropout": 0.0,
        "static_position_embeddings": True,
    }
    for stack in ("encoder", "decoder"):
        config |= {f"{stack}_attention_heads": model.num_heads, f"{stack}_ffn_dim": model.d_ff}
    return config
