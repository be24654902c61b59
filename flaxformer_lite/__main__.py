"""`python -m flaxformer_lite COMMAND --workdir=W ...`, also installed as `flaxformer-lite`."""

import sys
from collections.abc import Sequence

from flaxformer_lite import command_line
from flaxformer_lite.command_line import complain, exit_now, fail

USAGE = """usage: flaxformer-lite COMMAND --workdir=W ...    (COMMAND --help tells more)

  train      train a config, or go on with the run in a workdir
  evaluate   measure the best model of a run on a split
  translate  translate lines of text with the best model of a run"""


def train(arguments: Sequence[str]) -> int:
    """flags -> training.loop.fit; returns the exit code."""
    request = command_line.parse_train(arguments)
    from flaxformer_lite import runtime

    runtime.start()
    from flaxformer_lite.training import loop, parallel

    parallel.initialize(*request.processes)
    try:
        return loop.fit(request.config, request.workdir)
    except loop.Diverged as error:
        complain(str(error))
        return 1


def evaluate(arguments: Sequence[str]) -> int:
    """Prints all metrics of a split."""
    request = command_line.parse_evaluate(arguments)
    from flaxformer_lite import runtime

    runtime.start()
    from flaxformer_lite import evaluate
    from flaxformer_lite.training import report

    values, signature = evaluate.evaluate(request.workdir, request.split)
    print(f"{request.workdir}, {request.split} split\n{report.table(values)}\nsacreBLEU signature {signature}")
    return 0


def translate(arguments: Sequence[str]) -> int:
    """Reads lines, writes as many."""
    request = command_line.parse_translate(arguments)
    from flaxformer_lite import runtime

    runtime.start()
    from flaxformer_lite import translate

    translator = translate.load(request.workdir)  # before it waits for input that it could not use
    lines = command_line.read_lines(request.input)
    command_line.write_lines(request.output, translator(lines))
    return 0


COMMANDS = {"train": train, "evaluate": evaluate, "translate": translate}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and ends the process with its exit code: 2 for bad input, with one line that says what."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(USAGE)
        sys.exit(0 if arguments else 2)
    command, *rest = arguments
    if command not in COMMANDS:
        fail(f"{command!r}: no such command{command_line.did_you_mean(command, COMMANDS)}")
    try:
        code = COMMANDS[command](rest)
    except ValueError as error:
        complain(str(error))
        code = 2
    except BrokenPipeError:
        code = 0
    exit_now(code)


if __name__ == "__main__":
    main()
