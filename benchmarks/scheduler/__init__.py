"""What a step costs besides the model. `python -m benchmarks.scheduler --help`.

Our scheduler and, where it is installed, vLLM's take the same requests and turns, in the same run: some steps of one,
then as many of the other, round by round. Timed are `schedule()` and `update_from_output()` together; what a model
would have answered is made up in between.
"""
