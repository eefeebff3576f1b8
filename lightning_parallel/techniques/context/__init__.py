"""Context parallel: each rank holds a part of every sequence inside the layer stacks.

Outside of the stacks, sequences are whole on every rank, so positions, labels and the loss are those of one device.
Sequences are split at a stack's entry and gathered at its exit. For attention, ranks exchange positions for heads
(Ulysses), or keys and values go round (ring).
"""
