"""In and out: other people's weights as a run, and a run as what other engines read."""
