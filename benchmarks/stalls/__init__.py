"""Whether what connectors do in the background is felt by those who are served. `python -m benchmarks.stalls --help`.

    latency   time between tokens of running text requests, beside a connector that loads one item after another
    holds     for how long at most the connectors' threads keep Python's interpreter lock, without which no step begins

The loads take turns with each other and with no load at all, round by round. The connector that loads is not the
engine's own but one beside it, in the same process, driven from the same thread with the same calls: so what is
measured is the load, not the prompt that its item would bring along.
"""
