"""Blocks as whole objects on any fsspec filesystem: S3 and other object stores, a shared directory, memory."""
