"""Parts that all verbs share: the maths of a row, facts of a call, shards, checks."""
