"""`python -m swin_lessons` is `swin-lessons`."""

import sys

from swin_lessons.cli import main

sys.exit(main())
