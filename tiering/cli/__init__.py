"""The ``tiering`` command: what an operator runs. Each command has ``--json``: one object on stdout and nothing else."""
