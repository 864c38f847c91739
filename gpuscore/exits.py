"""How commands end: exit codes, and the signals that end a command."""

import signal

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_ENGINE = 70
EXIT_TEMPORARY = 75
EXIT_CONFIG = 78
EXIT_SIGNAL = 128  # plus the signal's number
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
