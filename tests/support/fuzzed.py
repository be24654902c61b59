"""Random configs, corpora, lines, objects and damages, for `fuzzing`."""

import bz2
import dataclasses
import gzip
import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from flaxformer_lite.field_rules import CHOICES
from flaxformer_lite.fields import Config

FIELDS = {
    f"{section.name}.{field.name}": field
    for section in dataclasses.fields(Config)
    for field in dataclasses.fields(section.default_factory)
}
ODD_TEXTS = [
    *("", " ", "None", "none", "null", "nan", "inf", "-inf", "-1", "0", "1", "2", "3", "8", "16"),
    *("0.5", "1.5", "-0.0", "1e-400", "1e400", "99999999999999999999", "4294967296", "1e3", "0x10"),
    *("1_0", "True", "False", "tru", "wide", "ünïcode", "日本", "\udcff", "\u2028", "a\nb", "%s"),
    *("()", "(1,)", "(16, 40)", "('a',", "[]", "[1, 2]", "a,b", "{}", "*", "**", "[", "/", ".."),
    *("~nobody/x", "gs:", "-", "--", "x" * 5000, "'; --", '"', "'", "\\", "last:2", "best:1"),
    *("last:0", "best:9999999999", "train[:8]", "train[8:8]", "train[-1:", "test+train", "all"),
    *("train[:8%]", "train[:٣]", "1" * 5000, "((" * 200, "lambda: 1", "__import__('os')"),
    *("cldr_translate", "cldr_translate/de", "cldr_language/x", "parallel_text", "plain_text"),
    *("labelled_text", "text,label", "en", "de", "source", ",", "en,de", "de,en", "text"),
]
ODD_VALUES = [
    *(None, True, False, 0, 1, -1, 2, 8, 2**31, 2**63, 2**64, 10**400, 0.5, -0.5, 1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), 1j, "", "x", "\0", "\ud800", "ünïcode", b"bytes"),
    *((), (1,), (16, 40), (16, None), ("a", 1), [], [8, 16], [[]], {}, {"a": 1}, {1, 2}),
    *(frozenset(), range(3), ..., NotImplemented, object, len, Exception("x")),
]
TEXTS = [
    *("one day", "two days", "three days", "Monday, May 5, 2025", "", " ", "\t", "\n", "a\n", "\r"),
    *("a\r\n", "\0", "\ufeffone day", "\u2028", "\u2581", "\uf8ff", "\ud800", "日本", "é" * 40),
    *("x" * 3000, "\U0001f468\u200d" * 50, "\u200b", "\u00a0", "a. b, c; d" * 40, "<s>", "</s>"),
    *("<pad>", "\u0301" * 99),
]
WORDS = (
    "one two three four five six seven days weeks years Tage Wochen Jahre Mai June 5 12 2025"
).split()


def overrides(rng: random.Random) -> list[str]:
    """Returns `--config.section.field=value` flags, one to four, most of them of a real field."""
    return [_override(rng) for _ in range(rng.choice([1, 1, 2, 3, 4]))]


def _override(rng: random.Random) -> str:
    name = rng.choice(list(FIELDS))
    default = FIELDS[name].default
    if rng.random() < 0.1:
        name = rng.choice([name[:-1], name.upper(), name.split(".")[0], f"{name}.x", "", ".", "é"])
    if rng.random() < 0.5:
        text = rng.choice(ODD_TEXTS)
    elif name in CHOICES:
        text = rng.choice(CHOICES[name])
    elif isinstance(default, float):
        text = str(rng.choice([rng.random(), 10 ** rng.uniform(-12, 6), default]))
    else:
        text = str(rng.choice([rng.randrange(0, 70), 2 ** rng.randrange(8), default]))
    sign = rng.choice(["="] * 20 + ["", "==", " "])
    return f"{rng.choice(['--', '--', '--', '-'])}config.{name}{sign}{text}"


def config_file(rng: random.Random, given: Mapping[str, object]) -> str:
    """Returns a config file that sets `given` and random objects, or is broken."""
    lines = ["from flaxformer_lite.config import default_config", "import numpy as np"]
    lines += ["def get_config():", "    config = default_config()"]
    lines += [f"    config.{name} = {_literal(value)}" for name, value in given.items()]
    for _ in range(rng.choice([0, 1, 1, 2])):
        value = rng.choice(
            [*map(ascii, ODD_VALUES[:-7]), "np.int64(3)", "np.ones(3)", "len", "..."]
        )
        value = value.replace("nan", "float('nan')").replace("inf", "float('inf')")
        target = rng.choice([*FIELDS, "model", "data", "other", "model.other"])
        lines.append(f"    config.{target} = {value}")
    ends = ["config"] * 9 + ["None", "{}", "config.model", "1/0", "get_config()", "config.x", "("]
    lines.append(f"    return {rng.choice(ends)}")
    return "\n".join(lines) + rng.choice(["\n"] * 9 + ["\0", "\n\ud800"])


def _literal(value: object) -> str:
    if isinstance(value, str) and value.startswith("("):
        return value
    is_files = isinstance(value, str) and value.startswith("/")
    return repr(tuple(value.split(",")) if is_files else value)


def corpus(rng: random.Random, folder: Path) -> tuple[str, dict[str, str]]:
    """Writes the files of a dataset, some damaged; returns its kind and the files of each split."""
    kind = rng.choice(["parallel_text", "parallel_text", "plain_text", "labelled_text"])
    form = rng.choice(["lines", "tsv", "jsonl"])
    if kind == "labelled_text" and form == "lines":
        form = "tsv"
    if kind == "plain_text" and form == "tsv":
        form = "lines"
    files = {}
    for split, count in (("train", rng.choice([0, 1, 40, 200])), ("validation", 8), ("test", 4)):
        rows = [_row(rng, kind) for _ in range(count)]
        if kind == "parallel_text" and form == "lines":
            contents = {"en": "\n".join(a for a, _ in rows), "de": "\n".join(b for _, b in rows)}
        else:
            contents = {"txt" if form == "lines" else form: _written(rng, kind, form, rows)}
        names = []
        for end, text in contents.items():
            rate = 0.4 if split == "train" else 0.15
            data, suffix = damaged_text(rng, (text + "\n").encode(), rate)
            names.append(f"{split}.{end}{suffix}")
            _put(rng, folder / names[-1], data)
        files[split] = ",".join(names)
    return kind, files


def whole_corpus(rng: random.Random, kind: str, folder: Path) -> dict[str, str]:
    """Writes well-formed files of a dataset; returns the fields that name them."""
    fields = {}
    for split, count in (("train", 80), ("validation", 8), ("test", 4)):
        rows = [_row(rng, kind) for _ in range(count)]
        columns = {
            "parallel_text": {"en": [a for a, _ in rows], "de": [b for _, b in rows]},
            "plain_text": {"txt": [b for _, b in rows]},
            "labelled_text": {"tsv": list(map("\t".join, rows))},
        }[kind]
        paths = [folder / f"{kind}.{split}.{end}" for end in columns]
        for path, texts in zip(paths, columns.values(), strict=True):
            path.write_text("\n".join(texts) + "\n", encoding="utf-8")
        fields[f"data.{split}_files"] = ",".join(map(str, paths))
    return fields


def _put(rng: random.Random, path: Path, data: bytes) -> None:
    """Writes a file, or seldom makes something else of its name."""
    odd = rng.random()
    if odd < 0.01:
        path.mkdir()
    elif odd < 0.02:
        path.symlink_to(path.name)
    elif odd > 0.01 and odd < 0.98:
        path.write_bytes(data)


def _row(rng: random.Random, kind: str) -> tuple[str, str]:
    first, second = (" ".join(rng.choices(WORDS, k=rng.randrange(1, 9))) for _ in range(2))
    return (rng.choice(["x", "y", "z"]), second) if kind == "labelled_text" else (first, second)


def _written(rng: random.Random, kind: str, form: str, rows: list[tuple[str, str]]) -> str:
    """Returns rows in the form of a file, seldom with one of a wrong shape."""
    if form == "lines":
        return "\n".join(second for _, second in rows)
    if form == "tsv":
        lines = ["\t".join(row) for row in rows]
        odd = ["a", "a\tb\tc", "\t", "a\t", "\tb", '"a\tb', "a\t\tb", "\t".join("x" * 99)]
    else:
        keys = {"plain_text": ("other", "text"), "labelled_text": ("label", "text")}
        names = keys.get(kind, ("en", "de"))
        records = [dict(zip(names, row, strict=True)) for row in rows]
        if kind == "parallel_text" and rng.random() < 0.3:
            records = [{"translation": record} for record in records]
        lines = [json.dumps(record, ensure_ascii=rng.random() < 0.5) for record in records]
        odd = ["{}", "[]", "1", "null", '"a"', "{", '{"en": 1, "de": 2}', '{"text": null}']
        odd += ['{"text": "\\ud800", "label": "x"}', '{"en": "\\u0000", "de": "a"}', "NaN"]
        odd += ['{"translation": []}', '{"en": "a", "en": "b"}', "[" * 5000, "1" * 5000]
        odd += ['{"label": ["x"], "text": "a"}', '{"label": 3, "text": "a"}', '{"": ""}']
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(odd))
    return "\n".join(lines)


def damaged_text(rng: random.Random, data: bytes, rate: float) -> tuple[bytes, str]:
    """Returns bytes of a text that may be damaged or compressed, and the suffix of their name."""
    if rng.random() < rate:
        kinds = [
            lambda: rng.randbytes(rng.randrange(300)),
            lambda: b"",
            lambda: data.rstrip(b"\n"),
            lambda: b"\xef\xbb\xbf" + data,
            lambda: data.decode().encode(rng.choice(["utf-16", "utf-16-le", "utf-32", "utf-7"])),
            lambda: data.replace(b"\n", rng.choice([b"\r\n", b"\r", b"\n\n", b"\xe2\x80\xa8"])),
            lambda: data + b"x" * rng.choice([100, 200_000]) + b"\n",
            lambda: data[: rng.randrange(len(data) + 1)],
            lambda: flipped(rng, data),
            lambda: _inserted(
                rng, data, rng.choice([b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b"\t"])
            ),
            lambda: _inserted(rng, data, rng.choice(TEXTS).encode(errors="surrogatepass")),
        ]
        data = rng.choice(kinds)()
    suffix = ""
    if rng.random() < 0.2:
        suffix = rng.choice([".gz", ".bz2", ""])
        data = bz2.compress(data) if suffix == ".bz2" else gzip.compress(data, mtime=0)
        if rng.random() < 0.4:
            data = rng.choice([flipped(rng, data), data[: rng.randrange(len(data))], data + b"x"])
    elif rng.random() < 0.03:
        suffix = rng.choice([".gz", ".xz", ".zst"])  # it is not compressed
    return data, suffix


def flipped(rng: random.Random, data: bytes) -> bytes:
    """Returns the data with one to five bytes replaced."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 6) if data else 0):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _inserted(rng: random.Random, data: bytes, part: bytes) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + part + data[place:]


def lines(rng: random.Random) -> bytes:
    """Returns bytes for standard input: lines of text, damaged or not."""
    usual = [_row(rng, "")[0] for _ in range(rng.randrange(5))]
    texts = [rng.choice(TEXTS) if rng.random() < 0.3 else text for text in usual]
    data = "\n".join(texts).encode(errors="replace") + rng.choice([b"", b"\n"])
    if rng.random() < 0.02:
        data += b"y" * (4 * 2**20 + 5)
    return damaged_text(rng, data, 0.4)[0]


class Text(str):
    """A text of another type."""


def value(rng: random.Random, depth: int = 0) -> object:
    """Returns any Python object, most often a list of texts."""
    odd = rng.random()
    if depth == 0 and odd < 0.6:
        items = [_item(rng) for _ in range(rng.choice([0, 1, 2, 3]))]
        as_array = lambda each: np.array(each, object)  # noqa: E731
        try:
            return rng.choice([list, list, list, tuple, iter, set, dict.fromkeys, as_array])(items)
        except TypeError:  # not hashable
            return items
    if odd < 0.8:
        return rng.choice(ODD_VALUES)
    texts = [rng.choice(TEXTS), Text("one day"), np.array(["one day"]), (each for each in "ab")]
    others = [np.float32(1), np.ones((2, 2)), Path("x"), object(), lambda: 1]
    return rng.choice([*texts, *others])


def _item(rng: random.Random) -> object:
    texts = rng.random() < 0.85
    return rng.choice(TEXTS) if texts else value(rng, 1)


def options(rng: random.Random, name: str, method: str) -> dict[str, object]:
    """Returns random keyword arguments of a method of the Python API."""
    chosen: dict[str, object] = {}
    if method == "stream" and rng.random() < 0.5:
        chosen[rng.choice(["long", "window"])] = rng.choice(["split", "refuse", 1, 2, *ODD_VALUES])
    if method == "n_best":
        chosen["n"] = rng.choice([1, 2, 4, *ODD_VALUES])
    if method == "load":
        names = [name.split(".")[1] for name in FIELDS if name.startswith("decode.")]
        names = ["average", "parameters", "ensemble", "tensor"] + names * (name != "classify")
        for name in rng.sample(names, rng.choice([1, 1, 2])):
            chosen[name] = rng.choice(
                [*ODD_VALUES, *CHOICES.get(f"decode.{name}", ()), "last:2", "raw", value(rng, 1)]
            )
    return chosen


def damage(rng: random.Random, folder: Path) -> str:
    """Damages one file or folder of a run; returns a description."""
    paths = sorted(path for path in folder.rglob("*") if ".lock" not in path.name)
    small = [path for path in paths if "checkpoints" not in path.parts and path.is_file()]
    records = [path for path in paths if "record" in path.parts and path.is_file()]
    path = rng.choice(rng.choice([paths, small, records]) or [folder])
    name = str(path.relative_to(folder))
    if path.is_dir():
        shutil.rmtree(path)
        if rng.random() < 0.3:
            path.write_bytes(b"")
        return f"removed {name}"
    data = path.read_bytes()
    ways = "delete empty truncate flip flip random folder swap json json".split()
    way = rng.choice(ways)
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way != "delete":
        path.write_bytes(_spoilt(rng, way, data, paths))
    if way == "flip" and rng.random() < 0.05 and os.geteuid() != 0:
        path.chmod(0)
    return f"{way} {name}"


def _spoilt(rng: random.Random, way: str, data: bytes, paths: list[Path]) -> bytes:
    if way == "truncate":
        return data[: rng.randrange(len(data) + 1)]
    if way == "flip":
        return flipped(rng, data)
    if way == "random":
        return rng.randbytes(rng.randrange(200))
    if way == "swap":
        other = rng.choice([path for path in paths if path.is_file()] or [Path(os.devnull)])
        return other.read_bytes()
    if way == "json":
        return _other_json(rng, data)
    return b""


def _other_json(rng: random.Random, data: bytes) -> bytes:
    """Returns JSON, or lines of JSON, with one value replaced; or any JSON at all."""
    odd = [None, 1, -1, "x", [], {}, [1], {"a": 1}, True, 1e308, "1" * 50, 2**70]
    try:
        rows = data.decode().splitlines() if b'"split"' in data else [data.decode()]
        number = rng.randrange(len(rows))
        record = json.loads(rows[number])
    except (ValueError, RecursionError):
        return json.dumps(rng.choice(odd)).encode()
    if rng.random() < 0.3:
        record = rng.choice(odd)
    node = record
    while isinstance(node, dict | list) and node:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.2:
            if isinstance(node, dict) and rng.random() < 0.3:
                del node[key]
            else:
                node[key] = rng.choice(odd)
            break
        node = node[key]
    rows[number] = json.dumps(record)
    return "\n".join([*rows, ""]).encode()
