"""What the package needs of the machine: errors, files, the process, memory, accelerators."""
