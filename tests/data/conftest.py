"""Streams share orders of documents."""

from tests import orders as orders
