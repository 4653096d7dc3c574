"""Blocks in Redis or Valkey, one key a block. ``backend.py`` is the entry; ``resp.py`` is the protocol.

This package is ``backends.redis``; the client library of the same name is neither needed nor imported here.
"""
