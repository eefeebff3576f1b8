"""The command line. Layer 7."""
