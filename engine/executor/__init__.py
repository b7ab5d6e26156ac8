"""Executors: where the model runner lives, and how steps get to it."""
