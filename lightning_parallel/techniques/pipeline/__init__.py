"""Pipeline parallel: each rank holds some of the layers, and microbatches flow through them."""
