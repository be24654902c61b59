"""Errors, files and buckets, the process, memory and accelerators."""
