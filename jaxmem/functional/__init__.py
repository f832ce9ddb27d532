"""The public functions of hidden states and a vocabulary matrix."""
