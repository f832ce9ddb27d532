"""The state of a run on disk: checkpoints, their damage, and resumption."""
