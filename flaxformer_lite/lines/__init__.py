"""Jobs over files of lines of any size."""
