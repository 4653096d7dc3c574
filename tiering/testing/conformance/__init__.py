"""The parts of the conformance kit, one module a theme. ``tiering.testing.BackendTests`` puts them together."""
