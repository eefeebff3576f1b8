"""Deferred initialisation: `configure_model` is recorded on the meta device, and replayed shard by shard."""
