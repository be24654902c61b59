"""From a TFDS name to token batches: builders, tokenizer, batch plan and loader."""
