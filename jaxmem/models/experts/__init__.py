"""Mixtures of experts: routing, and products of tokens grouped by expert."""
