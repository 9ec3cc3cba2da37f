"""``python -m fineinfer.cli``: the same as the ``fineinfer`` script."""

import sys

from fineinfer.cli import main

sys.exit(main())
