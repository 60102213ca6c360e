"""A module whose import takes far longer than any test waits, as a stand-in for torch on a slow disk."""

import threading

threading.Event().wait(60)
