"""What the test of fewer ranks runs in every rank: python growth_job.py FOLDER

On slot 3 it ends at once while FOLDER/broken is there, before anything slow is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

BROKEN = "broken"


def main() -> None:
    folder = Path(sys.argv[1])
    if os.environ["LOCAL_RANK"] == "3" and (folder / BROKEN).exists():
        sys.exit(9)
    from tests.recovery import growth

    growth.main(folder)


if __name__ == "__main__":
    main()
