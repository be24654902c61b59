"""The export of a run as named arrays and settings, for any other use."""

from pathlib import Path

import jax

from flaxformer_lite import config as config_lib
from flaxformer_lite.data.tokens.two_vocabularies import TwoVocabularies
from flaxformer_lite.exchange.folder import on_host, write_arrays, write_json
from flaxformer_lite.trained import Trained

INPUTS = {  # of the model, in the card's code
    "encoder_decoder": "np.array([[*ids, EOS]]), np.array([[BOS]])",
    "encoder_classifier": "np.array([[BOS, *ids, EOS]])",
    "decoder_lm": "np.array([[BOS, *ids]])",
}


def write(run: Trained, folder: Path) -> tuple[str, str]:
    """Writes the parameters by name, the config and the tokenizer.

    Returns:
      The name of the format, and a text on how to use it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(on_host(run.params))
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    write_arrays(folder / "model.safetensors", arrays)
    write_json(folder / "config.json", config_lib.to_dict(run.config))
    (folder / "tokenizer.model").write_bytes(run.tokenizer.content)
    sizes = "tokenizer.vocab_size"
    if isinstance(run.tokenizer, TwoVocabularies):
        sizes = "tokenizer.source.vocab_size, tokenizer.target.vocab_size"
    usage = (
        "model.safetensors holds the parameters by their names, parts separated by dots; "
        "config.json the settings that they belong to. In this folder, with `pip install "
        "flaxformer_lite safetensors`:\n\n```python\n"
        "import json\n"
        "from pathlib import Path\n\n"
        "import jax\n"
        "import numpy as np\n"
        "from flax.traverse_util import unflatten_dict\n"
        "from flaxformer_lite import config\n"
        "from flaxformer_lite.data.tokens.tokenizer import load\n"
        "from flaxformer_lite.fields import BOS, EOS\n"
        "from flaxformer_lite.model import transformer\n"
        "from safetensors.flax import load_file\n\n"
        'settings = config.resolve(json.loads(Path("config.json").read_text()))\n'
        'tokenizer = load(Path("tokenizer.model"), config.source_normalization(settings))\n'
        "model = transformer.build_model(config.with_vocabulary(settings, "
        f"{sizes}).model)\n"
        'params = unflatten_dict(load_file("model.safetensors"), sep=".")\n'
        '(ids,) = tokenizer.encode(["A text."])\n'
        'logits = jax.jit(model.apply)({"params": params}, '
        f"{INPUTS[run.config.model.architecture]})\n```"
    )
    return "safetensors", usage
