"""``python -m tiering`` is the ``tiering`` command."""

import sys

from tiering.cli.main import main

sys.exit(main())
