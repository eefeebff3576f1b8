"""The user's module: its layer stacks, snapshots of it, and trial runs of its layers."""
