"""What the router costs beside a bare pass-through. `python -m benchmarks.router --help`."""
