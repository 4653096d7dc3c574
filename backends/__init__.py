"""The built-in backends. They are reached through the entry points of ``tiering.backends``, never imported by name."""
