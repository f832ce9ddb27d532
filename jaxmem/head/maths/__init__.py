"""What every verb shares: the maths of a row, facts of a call, shards, checks."""
