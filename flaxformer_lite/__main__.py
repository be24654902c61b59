"""Runs a command: `python -m flaxformer_lite COMMAND ...`."""

from flaxformer_lite.cli.commands import main

if __name__ == "__main__":
    main()
