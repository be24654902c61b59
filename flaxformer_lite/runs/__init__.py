"""The folder of a run, its log, and checks between its processes."""
