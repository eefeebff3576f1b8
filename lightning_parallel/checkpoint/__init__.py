"""One checkpoint format for every strategy."""
