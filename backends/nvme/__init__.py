"""Blocks in segment files on a local NVMe device. ``backend.py`` is the entry; ``limits.py`` derives every bound."""
