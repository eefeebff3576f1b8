"""Techniques, one file or folder each; a technique never imports another."""
