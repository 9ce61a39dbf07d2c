"""Scoring a trained model on text that it has not seen."""
