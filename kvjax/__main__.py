"""``python -m kvjax``."""

import sys

from kvjax._command.main import main

sys.exit(main())
