"""Makes folders with random Marian models in Hugging Face's format, without the package's code."""

import io
import json
import random

import numpy as np
import sentencepiece
from safetensors.numpy import save_file

ENGLISH = (
    "a the man woman dog house street is are plays runs sits walks in on with red blue green "
    "small young old".split()
)
GERMAN = (
    "ein der die Mann Frau Hund Haus Straße ist sind spielt läuft sitzt geht in auf mit rot blau "
    "grün klein alt".split()
)


def sentences(words, number, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(words, k=rng.randrange(3, 12))) for _ in range(number)]


def spm(words, size):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(words, 501)),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        minloglevel=2,
    )
    return model.getvalue()


def pieces_of(model):
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return [
        processor.id_to_piece(i)
        for i in range(processor.vocab_size())
        if not processor.is_control(i)
    ]


def numbered(*models, pad_first=False):
    """A vocabulary in Marian's order: end, unknown, the pieces of all models, padding."""
    pieces = [piece for model in models for piece in pieces_of(model)]
    pieces = ["</s>", "<unk>", *(["<pad>", *pieces] if pad_first else [*pieces, "<pad>"])]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def make(
    folder,
    *,
    d_model=24,
    heads=4,
    d_ff=40,
    layers=(2, 3),
    pieces=(90, 101),
    share=True,
    tie=True,
    separate=False,
    seed=0,
    **config,
):
    """Writes the folder; `config` changes its config.json. Returns config.json and the arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    source, target = spm(ENGLISH, pieces[0]), spm(GERMAN, pieces[1])
    vocabularies = [numbered(source, target)] * 2
    if separate:  # of different sizes; the special tokens have the same numbers in both
        vocabularies = [numbered(source, pad_first=True), numbered(target, pad_first=True)]
    names = ["vocab.json", "target_vocab.json" if separate else "vocab.json"]
    for name, vocabulary in zip(names, vocabularies, strict=True):
        (folder / name).write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    rows = [max(vocabulary.values()) + 1 for vocabulary in vocabularies]
    pad = vocabularies[0]["<pad>"]
    settings = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "d_model": d_model,
        "vocab_size": rows[0],
        "decoder_vocab_size": rows[1],
        "encoder_layers": layers[0],
        "decoder_layers": layers[1],
        "max_position_embeddings": 64,
        "activation_function": "swish",
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": share,
        "tie_word_embeddings": tie,
        "dropout": 0.1,
        "eos_token_id": 0,
        "pad_token_id": pad,
        "decoder_start_token_id": pad,
        "forced_eos_token_id": 0,
    }
    for stack in ("encoder", "decoder"):
        settings |= {f"{stack}_attention_heads": heads, f"{stack}_ffn_dim": d_ff}
    settings |= config
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = {
        "separate_vocabs": separate,
        "unk_token": "<unk>",
        "source_lang": "eng",
        "target_lang": "deu",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    arrays = random_arrays(settings, rows, pad, share=share, tie=tie, seed=seed)
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    return settings, arrays


def random_arrays(config, rows, pad, *, share, tie, seed):
    """Arrays with the names of `save_pretrained`, so large that attention and biases matter."""
    rng, D, F = np.random.default_rng(seed), config["d_model"], config["encoder_ffn_dim"]

    def normal(*shape, scale):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    arrays = {"final_logits_bias": normal(1, rows[1], scale=0.5)}
    arrays["final_logits_bias"][0, 0] += 2.5  # otherwise no text ends
    tables = ["model.shared.weight"]
    if not (share and tie):
        tables = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"] + [
            "lm_head.weight"
        ] * (not tie)
    for name in tables:
        arrays[name] = normal(
            rows[0 if "encoder" in name or "shared" in name else 1], D, scale=1.5 * D**-0.5
        )
        arrays[name][pad] = 0
    for stack in ("encoder", "decoder"):
        for n in range(config[f"{stack}_layers"]):
            layer = f"model.{stack}.layers.{n}"
            shapes = {f"self_attn.{x}_proj": (D, D) for x in ("q", "k", "v", "out")} | {
                "fc1": (F, D),
                "fc2": (D, F),
            }
            norms = ["self_attn_layer_norm", "final_layer_norm"]
            if stack == "decoder":
                shapes |= {f"encoder_attn.{x}_proj": (D, D) for x in ("q", "k", "v", "out")}
                norms.append("encoder_attn_layer_norm")
            for name, shape in shapes.items():
                arrays[f"{layer}.{name}.weight"] = normal(*shape, scale=1.5 * shape[1] ** -0.5)
                arrays[f"{layer}.{name}.bias"] = normal(shape[0], scale=0.3)
            for name in norms:
                arrays[f"{layer}.{name}.weight"] = 1 + normal(D, scale=0.2)
                arrays[f"{layer}.{name}.bias"] = normal(D, scale=0.2)
    return arrays
