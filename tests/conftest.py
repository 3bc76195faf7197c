"""Makes `strategies` importable from every test, and steadies hypothesis on a busy machine."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("irc", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("irc")
