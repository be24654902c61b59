"""The command line: flags, and the commands."""
