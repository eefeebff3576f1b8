"""A run in pictures: its logs as one page of HTML."""
