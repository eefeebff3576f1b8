"""A run on several ranks, recorded, and compared with one process on the same batches."""
