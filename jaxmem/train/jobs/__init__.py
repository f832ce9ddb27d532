"""One file per training job, and what only it needs."""
