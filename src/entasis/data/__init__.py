"""Text to token shards, and token shards to a deterministic stream of batches."""
