"""Rows of several documents: none sees another, positions restart, and the wire says where each begins."""

from __future__ import annotations

import pytest
import torch

from swarm.models.layout import install_weights
from swarm.models.packing import decode_starts, encode_starts, packed, packed_mask, packed_positions, starts_bytes
from swarm.models.registry import family_of
from tests.harness.rigs.models import MODEL

LENGTHS = ((5, 7), (12,), (1, 1, 10))
POSITIONS = torch.tensor([[at for length in row for at in range(length)] for row in LENGTHS])


def test_starts_are_a_bit_a_token_and_come_back() -> None:
    sent = encode_starts(POSITIONS)
    assert len(sent) == starts_bytes(3, 12) == 5
    assert torch.equal(decode_starts(sent, 3, 12), POSITIONS)
    assert encode_starts(None) == b""


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x5A])
def test_any_bytes_give_positions_within_a_row(byte: int) -> None:
    positions = decode_starts(bytes([byte]) * starts_bytes(3, 12), 3, 12)
    assert (positions[:, 0] == 0).all()
    assert ((positions >= 0) & (positions < 12)).all()


def test_packing_is_over_with_its_block_and_the_one_around_it_is_there_again() -> None:
    assert packed_positions() is None
    assert packed_mask() is None
    with packed(POSITIONS):
        with packed(None):
            assert packed_mask() is None
        assert packed_positions() is POSITIONS
        mask = packed_mask()
        assert mask.sum().item() == sum(length * (length + 1) // 2 for row in LENGTHS for length in row)
    assert packed_positions() is None


def test_document_in_a_packed_row_of_ours_has_the_logits_that_it_has_alone() -> None:
    family = family_of(MODEL)
    model = family.build(family.whole)
    install_weights(model, family.initial_weights(0))
    tokens = torch.arange(36).view(3, 12) * 7 % MODEL.vocab_size
    with torch.no_grad():
        with packed(POSITIONS):
            together = model.logits(model(tokens))
        plain = model.logits(model(tokens))
        for row, lengths in enumerate(LENGTHS):
            at = 0
            for length in lengths:
                alone = model.logits(model(tokens[row : row + 1, at : at + length]))
                assert torch.allclose(together[row : row + 1, at : at + length], alone, atol=1e-5)
                at += length
    assert not torch.allclose(together[0, 5:], plain[0, 5:], atol=1e-3), "in a stream it sees what is before it"
    assert torch.allclose(together[1], plain[1], atol=1e-5), "a row of one document is as it was"
