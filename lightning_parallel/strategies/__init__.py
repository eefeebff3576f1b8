"""Lightning's edge: strategies and their precision plugins. Lifecycle only. Layer 4."""
