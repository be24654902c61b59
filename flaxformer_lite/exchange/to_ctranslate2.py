"""The export of a run as a folder for CTranslate2."""

from pathlib import Path
from typing import Any

from flaxformer_lite import config as config_lib
from flaxformer_lite.data.tokens.normalization import normalizing_code
from flaxformer_lite.data.tokens.two_vocabularies import tokenizer_of
from flaxformer_lite.exchange import ctranslate2_spec, tokenizer_code
from flaxformer_lite.exchange.folder import (
    about_decoding,
    check_exported,
    on_host,
    power_of_length,
    with_separate_layers,
    write_json,
    write_models,
)
from flaxformer_lite.fields import BOS, EOS, PAD, UNK, DecodeConfig
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.trained import Trained

# CTranslate2's beam search ends after PATIENCE * beam_size hypotheses have ended; ours ends when no
# active one can improve on them. Of 1,000 sentences both gave the same result for all with 2, and
# for 985 with 1, CTranslate2's default.
PATIENCE = 2


def write(run: Trained, folder: Path, *, quantization: str) -> tuple[str, str]:
    """Writes the model, the tokenizer, and decode.json: arguments to decode as the run does.

    Returns:
      The name of the format, and a text on how to use it.

    Raises:
      InputError: about a field, if CTranslate2 cannot run the model.
    """
    model, translates = run.config.model, run.config.model.architecture == "encoder_decoder"
    params = with_separate_layers(on_host(run.params), model)
    spec = ctranslate2_spec.build(model, params)
    source, target = (run.tokenizer.vocabulary_of(side) for side in ("source", "target"))
    special: dict[str, Any] = {
        "bos_token": target[BOS],
        "eos_token": target[EOS],
        "unk_token": target[UNK],
    }
    if translates:
        spec.register_source_vocabulary(source)
        spec.register_target_vocabulary(target)
        special |= {"decoder_start_token": target[BOS], "add_source_eos": True}
    else:
        spec.register_vocabulary(target)
    for name, value in special.items():
        setattr(spec.config, name, value)
    spec.validate()
    spec.optimize(quantization)
    spec.save(str(folder))
    write_models(run.tokenizer, folder)
    arguments = ctranslate2_arguments(
        run.config.decode, translates=translates, limit=model.max_length
    )
    write_json(
        folder / "decode.json", arguments | {"suppress_sequences": [[target[PAD]], [target[BOS]]]}
    )
    usage = _usage(run, source, target, translates=translates)
    return "CTranslate2", usage + about_decoding(
        run.config.decode, longest=run.longest, engine="CTranslate2"
    )


def _usage(run: Trained, source: list[str], target: list[str], *, translates: bool) -> str:
    """Returns Python code that decodes one text, as Markdown."""
    tokenise = tokenizer_code.of(run.tokenizer)
    codes = (piece for piece in source if piece.startswith(">>") and piece.endswith("<<"))
    kind = tokenizer_of(run.tokenizer, "source").kind
    code = None if kind in tokenizer_code.SYMBOLS else next(codes, None)
    start = [repr(code)] if code else [] if translates else [f'"{target[BOS]}"']
    pieces = ", ".join([*start, f"*{tokenise.pieces}"])
    engine, result = 'Translator(".").translate_batch', "hypotheses"
    if not translates:
        engine, result = 'Generator(".").generate_batch', "sequences"
    found = f"found[0].{result}[0]"
    lines = [
        "import " + ", ".join(filter(None, ("ctranslate2, json, pathlib", tokenise.imports))),
        *tokenise.setup,
        'text = "A text."',
        *normalizing_code(config_lib.source_normalization(run.config)).splitlines(),
        f"found = ctranslate2.{engine}([[{pieces}]], "
        '**json.loads(pathlib.Path("decode.json").read_text()))',
        f"print({tokenise.text.replace('{}', found)})",
    ]
    packages = filter(None, ("ctranslate2", tokenise.packages))
    usage = (
        f"In this folder, with `pip install {' '.join(packages)}`:\n\n```python\n"
        + "\n".join(lines)
        + "\n```"
    )
    if code:
        usage += (
            "\n\nA text starts with the code of the language to write, a token of its own, such "
            f"as {code}."
        )
    return usage


def ctranslate2_arguments(decode: DecodeConfig, *, translates: bool, limit: int) -> dict[str, Any]:
    """Returns arguments of `translate_batch` or `generate_batch` that decode as `decode` does.

    Args:
      limit: the most decoding steps, the end symbol counted; CTranslate2 has one limit for all
        texts.

    Raises:
      InputError: CTranslate2 lacks a setting, or it is not exported.
    """
    check_exported(decode)
    if decode.epsilon:
        raise InputError(
            f"config.decode.epsilon: CTranslate2 cannot sample with it, got {decode.epsilon}; set "
            "--epsilon=0, and --top_p in its place."
        )
    arguments: dict[str, Any] = {"beam_size": 1, "disable_unk": True}
    arguments["min_decoding_length" if translates else "min_length"] = decode.min_length
    arguments["max_decoding_length" if translates else "max_length"] = limit
    if translates:
        arguments["max_input_length"] = 0  # the default truncates silently after 1,024 tokens
    else:
        arguments["include_prompt_in_result"] = True
    if decode.no_repeat_ngram is not None:
        arguments["no_repeat_ngram_size"] = decode.no_repeat_ngram
    if decode.method == "beam":
        arguments |= {
            "beam_size": decode.beam_size,
            "length_penalty": power_of_length(decode),
            "patience": PATIENCE,
        }
    if decode.method == "sample":
        arguments |= {
            "sampling_temperature": decode.temperature,
            "sampling_topk": decode.top_k or 0,
        }
        arguments["sampling_topp"] = decode.top_p or 1.0
    return arguments
