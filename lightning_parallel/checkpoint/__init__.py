"""One format for every strategy. Layer 2."""
