"""Which worker of a stage gets a call. `base` says what a policy is, `registry` finds one by name or module path."""
