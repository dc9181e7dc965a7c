"""`python -m attnlib` is the `attnlib` command."""

import sys

from attnlib.cli import main

sys.exit(main())
