"""The folder of a run, and what the processes of a run have in common."""
