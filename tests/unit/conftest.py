"""Makes the helpers in `tests` importable."""

import sys
from pathlib import Path

# With --import-mode=importlib pytest adds nothing to the path; `tests` holds helpers such as synthetic_run.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
