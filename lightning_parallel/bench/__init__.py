"""Measurements of strategies on the same recipe: steps, memory, collectives and scaling, by rows that take turns."""
