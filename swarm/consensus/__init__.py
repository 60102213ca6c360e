"""Deciding a step once: votes, close records and their chain, the roster, and the ledger of contributions."""
