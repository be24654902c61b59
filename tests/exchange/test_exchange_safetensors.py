"""The export as named arrays: the code of its card restores the model of each architecture."""

import contextlib

import jax
import numpy as np
import pytest

from flaxformer_lite import trained
from flaxformer_lite.exchange.exports import export
from flaxformer_lite.fields import BOS, EOS

INPUTS = {
    "finished_run": lambda ids: ([[*ids, EOS]], [[BOS]]),
    "finished_classifier": lambda ids: ([[BOS, *ids, EOS]],),
    "finished_language_model": lambda ids: ([[BOS, *ids]],),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_the_code_of_the_card_restores_the_model_of_every_architecture(request, tmp_path, name):
    workdir = request.getfixturevalue(name)
    run = trained.load(workdir)
    export(
        run, workdir, tmp_path / "arrays", kind="safetensors", quantization="float32", license=None
    )
    card, names = (tmp_path / "arrays/README.md").read_text(), {}
    code = card.split("```python\n")[1].split("```")[0]
    with contextlib.chdir(tmp_path / "arrays"):
        exec(code, names)
    (ids,) = run.tokenizer.encode(["A text."])
    inputs = [np.array(ids) for ids in INPUTS[name](ids)]
    np.testing.assert_array_equal(
        names["logits"], jax.jit(run.model.apply)({"params": run.params}, *inputs)
    )
