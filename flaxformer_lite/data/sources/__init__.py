"""Where examples come from: TFDS datasets, and files of one's own."""
