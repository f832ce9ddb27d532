"""Documents, vocabularies and tasks: from files to packed batches."""
