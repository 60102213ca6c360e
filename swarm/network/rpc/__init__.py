"""Calls over one stream: frames, message bodies, the calling side and the answering side."""
