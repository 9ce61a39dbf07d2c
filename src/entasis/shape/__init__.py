"""What a transformer is over its depth: records, profiles, families, counts, rules. Pure Python, no torch."""
