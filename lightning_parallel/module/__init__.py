"""The user's module: what is found in it, what it was before, and what it does when it is tried."""
