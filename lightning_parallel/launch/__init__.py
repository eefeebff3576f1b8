"""Scripts and manifests with which a cluster starts the ranks of a command."""
