"""What any program needs: messages, fields, files, locks, processes, stopping."""
