"""The parts of `scoring.py`: error rates of symbols, groups, resampling."""
