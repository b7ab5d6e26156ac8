"""Measurements. Programs that a person runs, never timed tests."""
