"""The functions of the head: arguments, options and derivatives."""
