"""The dashboard as a person sees it: in a headless Chromium, driven from outside."""
