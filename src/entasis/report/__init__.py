"""Figures and the HTML page: draws the result files that studies write, and computes nothing."""
