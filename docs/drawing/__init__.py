"""The figures of the documentation, a module for each kind; `docs/figures.py` writes them."""
