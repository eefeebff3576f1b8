"""Lightning's own tests, with a strategy of ours in the place of the default one."""
