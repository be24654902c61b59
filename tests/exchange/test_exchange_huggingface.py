"""Hugging Face's Transformers: an imported model gives the same results, and exports load there."""

import dataclasses
import importlib.util

import jax
import marian_folders
import numpy as np
import pytest

from flaxformer_lite import trained
from flaxformer_lite.cli import exchange_flags
from flaxformer_lite.config import DecodeConfig
from flaxformer_lite.decoding.decoder import Decoder
from flaxformer_lite.exchange import from_marian
from flaxformer_lite.exchange.exports import export
from flaxformer_lite.fields import BOS, EOS, PAD, UNK

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("torch", "transformers")),
        reason="needs torch and transformers: pip install -e '.[bench]'",
    ),
    # Their own warnings while they load.
    pytest.mark.filterwarnings("default"),
]

# All with an odd vocabulary size: one shared matrix, one for each side, and three matrices.
FOLDERS = {
    "one for all": dict(d_model=24, heads=4, d_ff=40, layers=(2, 3)),
    "untied": dict(
        d_model=32, heads=8, d_ff=56, layers=(3, 1), share=False, activation_function="relu"
    ),
    "untied output": dict(
        d_model=16, heads=2, d_ff=24, layers=(1, 1), share=False, tie=False, seed=1
    ),
}
ROWS, EXTRA = 100, 30


@pytest.fixture(scope="module", params=FOLDERS)
def pair(request, tmp_path_factory):
    """Their model and tokenizer, the imported run, the folder of both, and config.json."""
    import torch
    from transformers import MarianMTModel, MarianTokenizer

    torch.set_num_threads(1)  # more threads are slower for so small a model
    path = tmp_path_factory.mktemp("pair")
    config, _ = marian_folders.make(path / "theirs", **FOLDERS[request.param])
    assert config["vocab_size"] % 2  # an odd vocabulary
    request = exchange_flags.parse_import(
        ["marian", str(path / "theirs"), f"--workdir={path / 'ours'}"]
    )
    from_marian.import_run(*request)
    model = MarianMTModel.from_pretrained(path / "theirs").eval()
    return (
        model,
        MarianTokenizer.from_pretrained(path / "theirs"),
        trained.load(path / "ours"),
        path,
        config,
    )


def texts():
    return marian_folders.sentences(marian_folders.ENGLISH, ROWS, seed=11)


def test_logits_agree_with_padding_on_both_sides(pair):
    import torch

    model, tokenizer, run, _, config = pair
    found = tokenizer(texts(), return_tensors="pt", padding=True)
    ids = {side: np.array(own) for side, own in run.tokenizer.theirs.items()}
    sources, rng = run.encode(texts()), np.random.default_rng(5)
    source_BS = np.zeros((ROWS, found["input_ids"].shape[1]), np.int32)
    target_BT = np.zeros((ROWS, 17), np.int32)
    for row, source in zip(source_BS, sources, strict=True):
        row[: len(source) + 1] = [*source, EOS]
    for row in target_BT:
        count = rng.integers(1, 17)
        row[:count] = [BOS, *rng.integers(UNK, len(ids["target"]), count - 1)]
    # both tokenizers split the texts the same way
    np.testing.assert_array_equal(ids["source"][source_BS], found["input_ids"])
    assert (source_BS == PAD).any() and (target_BT == PAD).any()
    masks = {
        "attention_mask": torch.tensor(source_BS != PAD),
        "decoder_attention_mask": torch.tensor(target_BT != PAD),
    }
    with torch.no_grad():
        theirs = model(
            input_ids=found["input_ids"],
            decoder_input_ids=torch.tensor(ids["target"][target_BT]),
            **{name: mask.long() for name, mask in masks.items()},
        ).logits.numpy()
    ours = np.asarray(jax.jit(run.model.apply)({"params": run.params}, source_BS, target_BT))
    both = [number for number in range(len(ids["target"])) if number != BOS]
    difference = np.abs(ours[:, :, both] - theirs[:, :, ids["target"][both]])[target_BT != PAD]
    assert difference.max() < 1e-4 and np.abs(theirs).max() > 3


@pytest.mark.parametrize("beams", [1, 4])
def test_translations_agree_token_by_token(pair, beams):
    import torch

    model, _, run, _, config = pair
    method = (
        {"method": "greedy"} if beams == 1 else {"method": "beam", "beam_size": beams, "alpha": 0.5}
    )
    if beams > 1:
        method["penalty"] = "power"
    run = trained.with_decode(run, {**method, "max_extra_length": EXTRA})
    ids = {side: np.array(own) for side, own in run.tokenizer.theirs.items()}
    sources = run.encode(texts())
    ours = Decoder(run.model, run.config.decode)(run.params, sources)
    # a text at the limit gets no end symbol
    options = {"num_beams": beams, "do_sample": False, "forced_eos_token_id": None}
    # this package generates neither padding nor unknown tokens
    options["bad_words_ids"] = [[config["pad_token_id"]], [1]]
    if beams > 1:  # by default their search stops before the best result is certain
        options |= {"length_penalty": 0.5, "early_stopping": "never"}
    different = []
    for source, written in zip(sources, ours, strict=True):
        row = torch.tensor(ids["source"][[*source, EOS]][None])
        with torch.no_grad():
            theirs = model.generate(
                input_ids=row, max_new_tokens=len(source) + 1 + EXTRA, **options
            )[0, 1:].tolist()
        theirs = theirs[: theirs.index(0)] if 0 in theirs else theirs
        if ids["target"][written].tolist() != theirs:
            different.append((source, ids["target"][written].tolist(), theirs))
    assert not different, different
    assert len({tuple(written.tolist()) for written in ours}) > 3


def test_an_export_loads_with_every_weight_unchanged(pair, tmp_path):
    import torch
    from transformers import MarianMTModel, MarianTokenizer

    model, tokenizer, run, path, _ = pair
    options = {"kind": "huggingface", "quantization": "float32", "license": None}
    export(run, path / "ours", tmp_path / "back", **options)
    state, again = model.state_dict(), MarianMTModel.from_pretrained(tmp_path / "back").state_dict()
    assert state.keys() == again.keys() and all(
        torch.equal(state[name], again[name]) for name in state
    )
    theirs = MarianTokenizer.from_pretrained(tmp_path / "back")
    assert theirs(texts())["input_ids"] == tokenizer(texts())["input_ids"]


def test_the_code_of_the_card_translates_with_a_model_trained_here(finished_run, tmp_path):
    """The tokenizer is that of a trained run; the weights are random, so that outputs are long."""
    import runs

    run = trained.load(finished_run)
    config = dataclasses.replace(run.config.model, norm_epsilon=1e-5)
    model, params = runs.varied_model(config)
    whole = dataclasses.replace(
        run.config, model=config, decode=DecodeConfig(method="greedy", max_extra_length=1000)
    )
    run = dataclasses.replace(run, config=whole, model=model, params=params)
    options = {"kind": "huggingface", "quantization": "float32", "license": None}
    export(run, finished_run, tmp_path / "out", **options)
    code = (tmp_path / "out/README.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(
        code.replace("FOLDER", str(tmp_path / "out")).replace("A text.", "Monday, 3 June 2024"),
        names,
    )
    (ours,) = Decoder(run.model, run.config.decode)(run.params, run.encode(["Monday, 3 June 2024"]))
    theirs = names["found"][0, 1:].tolist()
    # a text at the limit ends with the end symbol in their output
    assert len(theirs) == len(ours) == config.max_length
    assert theirs[:-1] == ours.tolist()[:-1]
