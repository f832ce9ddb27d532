"""Parts of any program: messages, fields, files, locks, processes, stopping."""
