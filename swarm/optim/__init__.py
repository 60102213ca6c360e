"""The optimizer: gradients summed once, AdamW and the outer optimizer, and the state of a part."""
