"""The command line as ``python -m kvjax``."""

import sys

from kvjax._command.main import main

if __name__ == "__main__":
    sys.exit(main())
