"""Faults on real processes and sockets while requests are answered. `python -m benchmarks.chaos --help`."""
