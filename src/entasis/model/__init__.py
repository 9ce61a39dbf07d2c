"""The network that a shape describes."""
