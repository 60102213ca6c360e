"""A module whose import takes longer than a test may take, as a stand-in for torch on a slow disk."""

import threading

threading.Event().wait(600)
