"""Tables, .tsv and .csv: their records, and a header or quotes that nobody has declared."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from flaxformer_lite.system.errors import InputError

DELIMITERS = {"tsv": "\t", "csv": ","}  # of each form
LOOKED_AT = 1000  # lines of a file that are searched for quotes
# Names of columns in lower case, besides those of the config; none is likely to be an example.
NAMES = frozenset(
    """
    source target src tgt trg ref reference original translation input output
    text label sentence sentence1 sentence2 premise hypothesis class category sentiment id
    english german french spanish italian dutch portuguese russian chinese japanese eng deu fra spa
    """.split()
)
LANGUAGE = re.compile("[a-z]{2}|[a-z]{2,3}[-_][a-z]{2,4}")  # 'en', 'pt_br', 'deu_latn'


class Record(NamedTuple):
    """A record of a table.

    `columns` is the reason if the quotes are wrong. Bytes that are not UTF-8 are surrogates in it.
    """

    number: int  # of its first line
    line: bytes  # its lines, joined by LF
    columns: list[str] | str


def records(
    lines: Iterable[bytes], form: str, *, quoted: bool, longest: int = 1 << 20
) -> Iterator[Record]:
    """Yields the records of a table; with quotes (RFC 4180) one may extend over several lines.

    Args:
      lines: the lines of a file, without their ends.
      form: a key of DELIMITERS.
      longest: the limit of a line in bytes; the quotes of a longer line are not read.
    """
    if not quoted:
        for number, line in enumerate(lines, start=1):
            fields = line.decode(errors="surrogateescape").split(DELIMITERS[form])
            yield Record(number, line, fields)
        return
    taken: list[bytes] = []

    def texts() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            # the prefix of a line that is too long may lack its closing quote
            is_whole = len(line) <= longest
            yield line.decode(errors="surrogateescape") + "\n" if is_whole else "\n"

    csv.field_size_limit(max(csv.field_size_limit(), longest))
    number, reader = 1, csv.reader(texts(), delimiter=DELIMITERS[form], strict=True)
    while True:
        try:
            columns: list[str] | str = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            last = number + len(taken) - 1
            columns = f"{error}, in lines {number:,} to {last:,}" if last > number else str(error)
        yield Record(number, b"\n".join(taken), columns)
        number += len(taken)
        taken.clear()


def header(path: str, record: Record | None) -> tuple[str, ...]:
    """Returns the names of the columns in the first record of a file; None: it has no record.

    Raises:
      InputError: the record does not name columns, or separates them by another character.
    """
    columns = "nothing" if record is None else record.columns
    names = () if isinstance(columns, str) else tuple(column.strip() for column in columns)
    if not any(names):
        got = columns if isinstance(columns, str) else ", ".join(map(ascii, columns))
        raise InputError(
            f"{path}:1: expected a header, the names of the columns, got {got or 'an empty line'}; "
            "fix it, or set data.header=False if it is an example."
        )
    if len(names) == 1 and re.search("[,;\t]", names[0]):
        raise InputError(
            f"{path}:1: expected commas between the columns of a .csv, and tabs in a .tsv, got "
            f"{names[0]!a}; save it with these, or set data.header=False if it is an example."
        )
    return names


def check_header(path: str, names: Sequence[str], wanted: Sequence[str]) -> None:
    """Raises InputError if the header does not have each wanted column once."""
    for name in wanted:
        if (count := names.count(name)) != 1:
            raise InputError(
                f"{path}:1: the header has {count or 'no'} column{'s' * (count > 1)} {name!r}, but "
                f"{', '.join(names)}; rename them, choose others by data.languages or "
                "data.text_features, or set data.header=False if this line is an example."
            )


def notices(
    path: str, head: Sequence[bytes], form: str, names: Sequence[str], *, languages: bool
) -> dict[str, str]:
    """Returns a warning for 'header' and for 'quoted' if the file seems to have them.

    Args:
      head: the first LOOKED_AT lines.
      names: of the texts, in the config.
      languages: whether the columns are two languages, which may have any names.
    """
    found, first = {}, next(records(head, form, quoted=form == "csv"), None)
    columns = [] if first is None or isinstance(first.columns, str) else first.columns
    words = ", ".join(columns)[:80].encode(errors="replace").decode()  # without surrogates
    where = f"{path}:1 ({words})"
    is_known = looks_like_header(columns, names, languages=languages)
    if form == "tsv" and is_known:
        found["header"] = (
            f"{where} looks like the names of columns, and is read as an example; set "
            "data.header=True if it names them, or False if it is an example."
        )
    if form == "csv" and languages and columns and not is_known:
        found["header"] = (
            f"{where} is read as the names of the columns; set data.header=False if it is an "
            "example, or True if it names them."
        )
    number, count = quoted_lines(head) if form == "tsv" else (0, 0)
    if count:
        found["quoted"] = (
            f"{path}:{number:,} and {count - 1:,} more of the first {len(head):,} lines have "
            "fields in the quotes of a spreadsheet, which stay in the texts; set data.quoted=True "
            "to remove them, or False if they belong to the texts."
        )
    return found


def looks_like_header(columns: Sequence[str], names: Sequence[str], *, languages: bool) -> bool:
    """Whether at least two columns of a first line, all different, are usual names of columns.

    Args:
      names: names from the config that count too.
      languages: whether codes of languages count.
    """
    words = [column.strip().strip('"').lower() for column in columns]
    known = NAMES | {name.lower() for name in names}
    found = [word for word in words if word in known or (languages and LANGUAGE.fullmatch(word))]
    return len(set(words)) == len(words) and len(found) >= 2


def quoted_lines(lines: Iterable[bytes]) -> tuple[int, int]:
    """Returns which lines of a TSV have fields that a spreadsheet quoted.

    Returns:
      The number of the first of them, and their count; zeros if they are below 1 % of the lines, or
      other quotes are frequent too: a spreadsheet quotes every field with a quote.
    """
    first = found = others = number = 0
    for number, line in enumerate(lines, start=1):
        fields = [field for field in line.decode(errors="replace").split("\t") if '"' in field]
        inner = [field[1:-1] for field in fields if re.fullmatch('"(?:[^"]|"")+"', field)]
        others += len(fields) - len(inner)
        if any("," in text or '""' in text for text in inner):
            first, found = first or number, found + 1
    return (first, found) if max(others * 10, number / 100) <= found else (0, 0)
