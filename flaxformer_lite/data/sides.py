"""The languages of a translation run, from its config."""

from pathlib import Path

from flaxformer_lite.fields import OWN_TEXT, Config, DataConfig
from flaxformer_lite.system.compressed import without_suffix


def source_language(config: Config) -> str | None:
    """Returns the source language of a run; None if it has none or is unknown."""
    data = config.data
    if config.model.architecture == "encoder_classifier":
        return None
    if data.source_language:
        return data.source_language
    return (_languages(data) or (None,))[0]


def target_language(config: Config) -> str | None:
    """Returns the target language of a run; None if it has none or is unknown."""
    languages = _languages(config.data)
    if config.model.architecture != "encoder_decoder" or len(languages) != 2:
        return None
    return languages[1] if languages[0] == source_language(config) else languages[0]


def _languages(data: DataConfig) -> tuple[str, ...]:
    """Returns the 2 languages, in the order of the config or the files; () if unknown."""
    if data.languages:
        return data.languages
    if data.dataset in OWN_TEXT:
        endings = [Path(without_suffix(path.rstrip("*"))).suffix[1:] for path in data.train_files]
        return tuple(endings) if len(set(endings)) == 2 and all(endings) else ()
    if data.tokenizer == "marian" and data.dataset == DataConfig().dataset:
        return ()  # imported weights, not trained yet
    first, _, second = data.dataset.rpartition("/")[2].partition(":")[0].partition("-")
    return (first, second) if second else ()
