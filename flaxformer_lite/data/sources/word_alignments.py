"""Word alignments of examples as text."""

from flaxformer_lite.scores import word_links
from flaxformer_lite.system.errors import InputError

ALIGNMENT = "alignment"  # a feature with this name has the links of the words of an example


def fault_of(source: str, target: str, line: str) -> str | None:
    """Returns why a line is no alignment of two texts; None if it is one."""
    try:
        links = word_links.links_of(line, where="the line")
    except InputError as error:
        return str(error)
    counts = len(source.split()), len(target.split())
    for i, j in sorted(links):
        if i >= counts[0] or j >= counts[1]:
            return f"link {i}-{j} of {counts[0]} source words and {counts[1]} target words, from 0"
    return None
