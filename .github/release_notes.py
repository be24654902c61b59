"""Prints the CHANGELOG.md section of a tag: `python .github/release_notes.py v0.2.0`.

Fails if a file states another version than the tag.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def stated_versions(root: Path) -> dict[str, str]:
    """Returns file to version of the files that state the version of the package."""
    found = {"pyproject.toml": tomllib.loads(_text(root, "pyproject.toml"))["project"]["version"]}
    patterns = {
        "flaxformer_lite/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r'^version: "?([^"\s]+)"?$',
        "CHANGELOG.md": r"^## \[(\d.*?)\]",  # the newest release comes first
    }
    for file, pattern in patterns.items():
        match = re.search(pattern, _text(root, file), re.MULTILINE)
        found[file] = match[1] if match else "no version"
    return found


def section(changelog: str, version: str) -> str:
    """Returns the text below the heading of `version`; raises ValueError without date or text."""
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    match = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if match is None or not match[1].strip():
        raise ValueError(f"CHANGELOG.md: expected text below '## [{version}] - YYYY-MM-DD'")
    return match[1].strip()


def notes(tag: str, root: Path = ROOT) -> str:
    """Returns the release notes of a tag; raises ValueError if a file states another version."""
    version = tag.removeprefix("v")
    wrong = [
        f"{file} has {found}" for file, found in stated_versions(root).items() if found != version
    ]
    if wrong or tag == version:
        raise ValueError(
            f"tag {tag}: expected v{version} and {version} everywhere; {'; '.join(wrong)}"
        )
    return section(_text(root, "CHANGELOG.md"), version)


def _text(root: Path, file: str) -> str:
    return (root / file).read_text(encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python .github/release_notes.py v1.2.3")
    try:
        print(notes(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
