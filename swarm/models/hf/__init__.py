"""Causal language models of Hugging Face's ``transformers`` as a family."""
