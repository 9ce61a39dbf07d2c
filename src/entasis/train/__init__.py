"""Training: one loop, one explicit state."""
