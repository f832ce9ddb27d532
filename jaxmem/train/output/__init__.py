"""The output of a run: progress, metrics, charts and reports."""
