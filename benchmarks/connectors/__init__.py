"""The connectors beside what the machine can do in the same run. `python -m benchmarks.connectors --help`.

Each way of moving bytes takes turns, round by round, with what bounds it: a memcpy, bare safetensors, bare ZeroMQ, a
bare socket. A ratio is the median over the rounds of (time of the bound / time of ours), so that a machine that is
busy for a while slows both. Nothing is measured before every page has been touched and every connection made.
"""
