"""Shared inputs, references and checks of the tests, a module for each subject."""
