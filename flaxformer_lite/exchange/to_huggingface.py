"""The export of a run as a `MarianMTModel` for Hugging Face's Transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_lite import config as config_lib
from flaxformer_lite.checks.vocabularies import SIDES
from flaxformer_lite.data.tokens.any_tokenizer import SPECIAL, AnyTokenizer
from flaxformer_lite.data.tokens.marian_tokenizer import MarianTokenizer, start_piece
from flaxformer_lite.data.tokens.normalization import normalizing_code
from flaxformer_lite.data.tokens.two_vocabularies import TwoVocabularies, tokenizer_of
from flaxformer_lite.exchange import marian_config, marian_weights, tokenizer_code
from flaxformer_lite.exchange.folder import (
    about_decoding,
    check_exported,
    on_host,
    power_of_length,
    with_separate_layers,
    write_arrays,
    write_json,
)
from flaxformer_lite.fields import BOS, EOS, PAD, UNK, DecodeConfig
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.trained import Trained

# our name -> Marian's name
ACTIVATIONS = {ours: theirs for theirs, ours in reversed(marian_config.ACTIVATIONS.items())}


def write(run: Trained, folder: Path) -> tuple[str, str]:
    """Writes the folder for `from_pretrained` of `MarianMTModel` and `MarianTokenizer`.

    Returns:
      The name of the format, and a text on how to use it.

    Raises:
      InputError: about a field, if a `MarianMTModel` cannot hold the model.
    """
    model = run.config.model
    _check_tokenizer(run.tokenizer)
    marian_config.check_exportable(model)
    params = with_separate_layers(on_host(run.params), model)
    vocabularies, special, ids = _vocabularies(run, params)
    rows = {side: len(vocabulary) for side, vocabulary in vocabularies.items()}
    arrays = marian_weights.stored(marian_weights.to_theirs(params, model, ids, rows))
    shared, tied = marian_weights.SHARED in arrays, marian_weights.OUTPUT not in arrays
    write_arrays(folder / "model.safetensors", arrays, {"format": "pt"})
    special_ids = {role: vocabularies["target"][piece] for role, piece in special.items()}
    id_fields = {
        "decoder_start_token_id": special_ids["start"],
        "eos_token_id": special_ids["eos"],
        "forced_eos_token_id": special_ids["eos"],
        "pad_token_id": special_ids["pad"],
    }
    write_json(folder / "config.json", id_fields | _config(run, rows, shared=shared, tied=tied))
    never = sorted(
        {special_ids["pad"], special_ids["start"], special_ids["unk"]} - {special_ids["eos"]}
    )
    generation = id_fields | {"bad_words_ids": [[id] for id in never]}
    generation |= generation_settings(run.config.decode, limit=model.max_length)
    write_json(folder / "generation_config.json", generation)
    separate = vocabularies["source"] != vocabularies["target"]
    write_json(folder / "vocab.json", vocabularies["source"])
    if separate:
        write_json(folder / "target_vocab.json", vocabularies["target"])
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "separate_vocabs": separate,
        "model_max_length": model.max_length,
    }
    settings |= {f"{role}_token": special[role] for role in ("pad", "eos", "unk")}
    write_json(folder / "tokenizer_config.json", settings)
    models = list(run.tokenizer.models.values())
    (folder / "source.spm").write_bytes(models[0])
    (folder / "target.spm").write_bytes(models[-1])
    usage = (
        "With `pip install transformers torch sentencepiece`, where FOLDER is this "
        "folder:\n\n```python\n"
        "from transformers import MarianMTModel, MarianTokenizer\n"
        'model, tokenizer = MarianMTModel.from_pretrained("FOLDER"), '
        'MarianTokenizer.from_pretrained("FOLDER")\n'
        'text = "A text."\n'
        f"{normalizing_code(config_lib.source_normalization(run.config))}"
        'found = model.generate(**tokenizer([text], return_tensors="pt"))\n'
        "print(tokenizer.batch_decode(found, skip_special_tokens=True))\n```"
    )
    return "transformers", usage + about_decoding(
        run.config.decode, longest=run.longest, engine="Transformers"
    )


def _check_tokenizer(tokenizer: AnyTokenizer) -> None:
    """Raises InputError if the tokenizer of a side is no SentencePiece model.

    The special tokens of both sides have the same names in a `MarianTokenizer`.
    """
    for side in SIDES if isinstance(tokenizer, TwoVocabularies) else SIDES[:1]:
        kind = tokenizer_of(tokenizer, side).kind
        if kind in tokenizer_code.SYMBOLS:
            raise InputError(
                f"config.data.{'target_' if side == 'target' else ''}tokenizer: the tokenizer of a "
                f"MarianMTModel is a SentencePiece model, and this run has {kind!r}; use export "
                "ctranslate2 or export safetensors."
            )
    source, target = (tokenizer.vocabulary_of(side)[:SPECIAL] for side in SIDES)
    if isinstance(tokenizer, TwoVocabularies) and source != target:
        raise InputError(
            "config.data.target_tokenizer: the special tokens of both tokenizers of a "
            f"MarianMTModel have the same names, and these are {source} and {target}; use export "
            "ctranslate2 or export safetensors."
        )


def generation_settings(decode: DecodeConfig, *, limit: int) -> dict[str, Any]:
    """Returns the fields of generation_config.json that decode as `decode` does.

    Args:
      limit: the most decoding steps, the end symbol counted.

    Raises:
      InputError: a field of `decode` is not exported.
    """
    check_exported(decode)
    settings: dict[str, Any] = {
        "max_length": limit + 1,  # with the start symbol
        "min_length": decode.min_length + 1,
        "num_beams": 1,
        "do_sample": False,
    }
    if decode.no_repeat_ngram is not None:
        settings["no_repeat_ngram_size"] = decode.no_repeat_ngram
    if decode.method == "beam":
        settings |= {"num_beams": decode.beam_size, "length_penalty": power_of_length(decode)}
    if decode.method == "sample":
        settings |= {
            "do_sample": True,
            "temperature": decode.temperature,
            "top_k": decode.top_k or 0,
        }
        settings["top_p"] = 1.0 if decode.top_p is None else decode.top_p
        settings["epsilon_cutoff"] = decode.epsilon
    return settings


def _vocabularies(
    run: Trained, params: Mapping[str, Any]
) -> tuple[dict[str, dict[str, int]], dict[str, str], dict[str, list[int]]]:
    """Returns piece -> Marian's id by side, special pieces, and Marian's id for each of ours."""
    tokenizer = run.tokenizer
    if not isinstance(tokenizer, MarianTokenizer):
        by_side = {side: tokenizer.vocabulary_of(side) for side in SIDES}
        own = {side: {piece: n for n, piece in enumerate(by_side[side])} for side in SIDES}
        pieces = by_side["target"]
        special = {"pad": pieces[PAD], "start": pieces[BOS], "eos": pieces[EOS], "unk": pieces[UNK]}
        return own, special, {side: list(range(len(by_side[side]))) for side in SIDES}
    vocabularies, special, ids = (
        dict(tokenizer.vocabulary),
        dict(tokenizer.special),
        dict(tokenizer.theirs),
    )
    start = start_piece(vocabularies["target"], special)
    if start != special["start"] and not marian_weights.start_is_copy(
        params, run.config.model, ids
    ):
        special["start"] = start  # training has changed its embedding: it is a separate token
        same = vocabularies["source"] == vocabularies["target"]
        for side in MarianTokenizer.SIDES if same else ("target",):
            start_id = len(vocabularies[side])
            ids[side] = [*ids[side][:BOS], start_id, *ids[side][BOS + 1 :]]
            vocabularies[side] = vocabularies[side] | {start: start_id}
    return vocabularies, special, ids


def _config(run: Trained, rows: Mapping[str, int], *, shared: bool, tied: bool) -> dict[str, Any]:
    """Returns config.json without the ids of special tokens."""
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
        "activation_dropout": model.feed_forward_dropout,
        "static_position_embeddings": True,
    }
    for stack in ("encoder", "decoder"):
        config |= {f"{stack}_attention_heads": model.num_heads, f"{stack}_ffn_dim": model.d_ff}
    return config
