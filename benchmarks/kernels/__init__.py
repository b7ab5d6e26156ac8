"""The kernels beside what the device can do and what PyTorch does, in one run. `python -m benchmarks.kernels --help`.

`make bench-gpu` is all of it on a GPU: first every kernel's result against its twin in float64, then the device's copy
bandwidth and matrix rate, then each kernel. It needs torch, Triton and numpy, and transformers for the model; a plot
needs matplotlib besides. Without a GPU, `--device cpu --quick` goes through the same code under Triton's interpreter;
its figures say nothing.
"""
