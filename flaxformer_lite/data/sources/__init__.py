"""Sources of examples: TFDS datasets and custom text files."""
