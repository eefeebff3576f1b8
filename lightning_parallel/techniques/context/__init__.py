"""Context parallel: each rank holds a part of every sequence inside the layer stacks.

Outside of the stacks sequences are whole on every rank, so positions, labels and the loss are those of one device. At a
stack's entry they are split, around attention ranks exchange what the kind of attention needs, and at the exit they are
gathered.
"""
