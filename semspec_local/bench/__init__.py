"""Measuring: arms to compare a run with."""
