"""One file, one technique; a technique never imports another."""
