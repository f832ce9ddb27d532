"""Streams share orders of documents."""

from tests.helpers import orders as orders
