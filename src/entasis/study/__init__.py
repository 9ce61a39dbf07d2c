"""Studies: several runs, and what may be said of them."""
