"""The ranks: how many there are on each axis, their mesh, and what they send to each other."""
