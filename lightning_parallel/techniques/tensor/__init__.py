"""Tensor parallel: each rank holds a part of the linear maps of each layer, and some of the heads.

Source: Shoeybi et al. 2019, "Megatron-LM". A branch begins with maps split by columns, which read whole hidden states,
and ends with one split by rows, whose results are added up: one all-reduce for each branch in forward, and one in
backward, which maps that read the same hidden states share. Between branches, hidden states are whole on every rank or
split along the sequence (`regions`).

Inside a branch, tensors are plain and local where the layer's code allows it (it asks for ``-1`` heads). Otherwise they
are DTensors, which know the total number of heads. A comparison of the split layer with its unsplit self, results and
gradients, shows in its first run which of the two is right, or that neither is.
"""
