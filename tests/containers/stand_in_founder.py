"""What stands for the founder where its dashboard is read: it serves a text that was made before, by the dashboard's
own rules of who may read. Standard library only, inside an image that has no more."""

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from peers.dashboard.access import Access

host, _, port = os.environ["SWARM_DASHBOARD"].partition(":")
access = Access(host=host, token=os.environ["SWARM_DASHBOARD_TOKEN"])


class Metrics(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self):
        """Answer it."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        refused = access.refuse("GET", self.path, headers)
        status, text = refused or (200, Path("/stand-in/exposition").read_text())
        self.send_response(status)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(text.encode())


ThreadingHTTPServer((host, int(port)), Metrics).serve_forever()
