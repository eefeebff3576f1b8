"""Tensor parallel: each rank holds a part of the linear maps of each layer, and some of the heads.

Source: Shoeybi et al. 2019, "Megatron-LM". A branch begins with maps split by columns, which read whole hidden states,
and ends with one split by rows, whose results are added up: one all-reduce a branch in forward, and one in backward,
where maps that read the same hidden states share it. How hidden states are held between branches is a matter of the
borders (`tensor_borders`).

Inside a branch, tensors are plain and local where the layer's code allows (it asks for ``-1`` heads), else DTensors,
which know how many heads there are in all. Which of the two is right for a layer, and whether either is, shows when it
runs for the first time: it is compared with its unsplit self, results and gradients.
"""
