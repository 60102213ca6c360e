"""Identities and signatures."""
