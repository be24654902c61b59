"""The progress display of a sweep: a table on a terminal, permanent lines in a log."""

import io
import re

import pytest

from flaxformer_lite.sweep import board as board_lib
from flaxformer_lite.sweep.board import Board

STATES = {0: ("complete", ""), 1: ("failed", "why"), 2: ("running", "")}


class Terminal(io.StringIO):
    """A terminal that applies the cursor moves and the erasing."""

    def isatty(self):
        return True

    def screen(self):
        lines = [""]
        for part in re.split(r"(\x1b\[\d*[FJ]|\n)", self.getvalue()):
            if part == "\n":
                lines.append("")
            elif up := re.fullmatch(r"\x1b\[(\d+)F", part):
                del lines[len(lines) - int(up[1]) :]
                lines[-1] = ""
            elif part != "\x1b[J":
                lines[-1] += part
        return [line for line in lines if line]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(board_lib, "REFRESH_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "10")
    return Terminal()


def test_the_table_replaces_the_previous_one_below_the_permanent_lines(terminal, monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal)
    board = Board(5)
    board.show([(2, "heads=1: step 3/20")], lambda: STATES)
    board.print("point 0: complete")
    board.show([(2, "heads=1: step 4/20"), (3, "heads=2: " + "x" * 60)], lambda: STATES)
    first, counts, second, third = terminal.screen()
    assert first == "point 0: complete"
    # cut at the width, so that it takes one line
    assert counts == "5 points: 1 complete, 1 failed, 1 runni"
    assert second == "    2  heads=1: step 4/20" and len(third) == 39


def test_a_log_gets_no_table(capsys):
    board = Board(5)
    board.show([(2, "heads=1: step 3/20")], lambda: STATES)
    board.print("point 0: complete")
    assert capsys.readouterr().err == "point 0: complete\n"
