"""Lists the published results, measures one again, and renders the tables of the documentation.

    python -m benchmarks                       # all results, one line each
    python -m benchmarks NAME [FLAGS]          # measures NAME again with FLAGS, and compares
    python -m benchmarks NAME --save           # the same, and publishes the new figures
    python -m benchmarks render [--check]      # fills the tables of README.md and docs/

Runs and plots are in `runs/benchmarks/`. A comparison that was stopped continues there; a finished
one starts again from nothing. `--save` needs a checkout of git without changed files.

A run ends with 1 if a figure that does not depend on the hardware is outside the spread, `render
--check` if a page differs from the results, and every command with 2 if a file is invalid.
"""

import sys

from benchmarks import rendering, rerun, results


def show_list() -> int:
    """Prints a line for each result."""
    found = results.read_all()
    width = max(map(len, found), default=0)
    for name, result in found.items():
        headline = results.filled(result.headline, found, name, name)
        facts = [result.kind, headline, result.date, result.hardware]
        print(f"{name:{width}}  {'; '.join(fact or rendering.UNKNOWN for fact in facts)}")
    return 0


def measure(name: str, flags: list[str]) -> int:
    """Measures a result again, prints the comparison, and with '--save' publishes the figures."""
    found, save = results.read_all(), "--save" in flags
    if name not in found:
        raise results.ResultError(f"{name}: expected render, list, {', '.join(found)}")
    passed = [flag for flag in flags if flag != "--save"]
    if save and passed:
        raise results.ResultError(
            f"--save: publishes the figures of the file's own commands; remove {' '.join(passed)}"
        )
    commit = rerun.clean_commit() if save else None
    result, here = found[name], rerun.hardware()
    if other := rerun.other_data(result):
        print(f"{name}: {other}: figures will differ and are not compared", flush=True)
    output = rerun.output_of(result, passed)
    measured, seconds, output = rerun.timed_run(result, passed, output)
    comparisons = rerun.compare(result, measured, here)
    print(f"\n{name}: published {result.date} on {result.hardware}; now on {here}")
    print(rerun.table(comparisons))
    if output.exists():
        print(f"Runs and plots: {output}")
    if save:
        new = rerun.updated(result, measured, seconds=seconds, commit=commit)
        print(results.write(new), *rerun.publish(output), sep="\n")
        if result.note:
            print(f"The note was removed; add the parts that still hold: {result.note}")
        print("python -m benchmarks render updates the tables.")
    if all(each.measured is None for each in comparisons):
        raise results.ResultError(f"{name}: the run measured none of the published figures")
    return int(any(each.fails for each in comparisons))


def render(flags: list[str]) -> int:
    """Updates the tables of all pages; with '--check' only names those that differ."""
    if unknown := set(flags) - {"--check"}:
        raise results.ResultError(f"render: expected --check or nothing, got {unknown.pop()}")
    check = bool(flags)
    changed = rendering.differing(write=not check)
    for path in changed:
        text = "differs from results/; run python -m benchmarks render" if check else "updated"
        print(f"{path.relative_to(rendering.ROOT)}: {text}")
    return int(check and bool(changed))


def main(arguments: list[str]) -> int:
    """Returns the exit code of a command line."""
    name, *flags = arguments or ["list"]
    try:
        if name in ("-h", "--help"):
            print(__doc__)
            return 0
        if name == "list":
            return show_list()
        return render(flags) if name == "render" else measure(name, flags)
    except results.ResultError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
