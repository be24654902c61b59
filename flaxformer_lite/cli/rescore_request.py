"""The arguments of `rescore`."""

from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_lite.lines.line_job import LineJob

FORMATS = ("tsv", "jsonl")


class RescoreRequest(NamedTuple):
    """Arguments of `rescore`."""

    workdir: Path
    job: LineJob
    model: dict[str, Any]  # those of `rescore.load` that are given
    format: str  # a choice of FORMATS
    tokens: bool  # whether each line has its tokens
    long: str  # 'refuse' or 'skip'
    total: bool  # whether the sums over the file are printed, in place of lines
    surprisal: bool  # whether each row is a word
    alignments: dict[str, Any] | None  # arguments of `alignments.reading_of`; None: no alignment
    given: frozenset[str]  # names of the flags that are given

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect the output, beside the model and the input."""
        names = ("format", "tokens", "surprisal", "alignments")
        own = {f"--{name}": getattr(self, name) for name in names}
        return {
            "command": "rescore",
            "--window": self.job.window,
            "--long": self.long,
            "--target": self.job.target is not None,
            **own,
        }
