"""Tensor work of the engine's hot path. This file stays empty of code: see ARCHITECTURE.md on the name `kernels`."""
