"""From text to token ids."""
