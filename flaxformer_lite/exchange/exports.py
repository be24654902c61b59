"""The export of a run as a folder for other engines."""

from pathlib import Path

from flaxformer_lite.exchange import to_ctranslate2, to_huggingface, to_safetensors
from flaxformer_lite.exchange.card import card
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.system.storage import new_folder, place
from flaxformer_lite.trained import Trained


def export(
    run: Trained, workdir: Path, output: Path, *, kind: str, quantization: str, license: str | None
) -> None:
    """Writes the folder `output`, completely or not at all.

    Args:
      kind: 'ctranslate2', 'huggingface' or 'safetensors'.
      quantization: for 'ctranslate2' only.
      license: for the card; None: that of imported weights, or 'unknown'.

    Raises:
      InputError: the format cannot hold the model, or the folder cannot be written.
    """
    with new_folder(output) as folder:
        if kind == "ctranslate2":
            name, usage = to_ctranslate2.write(run, folder, quantization=quantization)
        else:
            writer = {"huggingface": to_huggingface, "safetensors": to_safetensors}[kind]
            name, usage = writer.write(run, folder)
        text = card(run, Workdir(place(workdir)), kind=name, usage=usage, license=license)
        # The names of the files that the run was trained on need not be UTF-8.
        (folder / "README.md").write_bytes(text.encode(errors="backslashreplace"))
