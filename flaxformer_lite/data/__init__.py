"""Datasets as token batches: builders, tokenizer, batch plan and loader."""
