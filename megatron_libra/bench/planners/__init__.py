"""One file a published rule, each `plan(pool, ...) -> Outcome`, re-implemented from its text."""
